"""One rank of `asyncrl sft`: supervised training on the environment's demonstrations, then the model as a folder.

The launcher starts it like the trainer's ranks (`--role sft`). It shares policy, packing and optimiser with
reinforcement learning (sft.py) and knows nothing of replay buffers or generators.
"""

from __future__ import annotations

import logging

import torch

from asyncrl.chat import Chat
from asyncrl.metrics import open_trackers
from asyncrl.models import load_tokenizer
from asyncrl.settings import Run
from asyncrl.training.export import export, export_adapter
from asyncrl.training.model import load_policy
from asyncrl.training.optimizer import learning_rate
from asyncrl.training.ranks import join_ranks, leave_ranks, make_mesh
from asyncrl.training.reports import epoch_size
from asyncrl.training.sft import Demonstrations, seed_all, train_on_demonstrations

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(run: Run) -> None:
    """`training.steps` steps of `training.batch_size` demonstrations each, or fewer where those end; the model goes to
    RUN/model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config = run.config
    ranks = join_ranks(with_gpus=config.services.trainer.with_gpus, timeout_s=config.supervise.stall_limit_s)
    seed_all(config.seed)
    tokenizer = load_tokenizer(config.model.path)
    if config.model.chat_template is not None:
        tokenizer.chat_template = config.model.chat_template
    policy = load_policy(config, ranks, make_mesh(config.parallelism, ranks))
    trackers = open_trackers(run) if ranks.is_first else None
    size = epoch_size(run.env.epoch_demonstrations) if ranks.is_first else None

    demonstrations = Demonstrations(run.env, Chat.of(config, tokenizer), longest=config.training.seq_len)

    def on_step(step: int, loss: float) -> None:
        if trackers is not None:
            rate = learning_rate(config.training, step)
            known = {"data/epoch": demonstrations.num_read / size} if size else {}
            row = {"sft/loss": loss, "sft/too_long": demonstrations.num_too_long, "optimizer/learning_rate": rate}
            trackers.log({"step": step, "version": step, **row, **known})

    train_on_demonstrations(
        policy,
        demonstrations=demonstrations,
        config=config.training,
        ranks=ranks,
        steps=config.training.steps,
        batch_size=config.training.batch_size,
        rate=lambda step: learning_rate(config.training, step),
        on_step=on_step,
    )
    dtype = DTYPES[config.training.dtype]
    export(policy, run.dir / "model", path=config.model.path, tokenizer=tokenizer, dtype=dtype, ranks=ranks)
    if config.training.lora.rank:
        lora = config.training.lora
        export_adapter(policy, run.dir / "adapter", path=config.model.path, config=lora, ranks=ranks)
    if trackers is not None:
        trackers.close()
    leave_ranks()
