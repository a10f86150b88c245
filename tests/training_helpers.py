"""Small models, batches and processes for the tests of the training room. Not a test itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from asyncrl.algorithm import Algorithm
from asyncrl.config import Config
from asyncrl.training.batch import Sequences, micro_batches
from asyncrl.training.model import Policy, load_policy
from asyncrl.training.ranks import Ranks, join_ranks, make_mesh
from asyncrl.training.step import Learner, Reference, with_reference
from asyncrl.training.totals import Totals
from asyncrl.types import Episode, Group, Prompt


def lone_rank() -> Ranks:
    """This process as the only rank."""
    torch.set_num_threads(1)
    return join_ranks(with_gpus=False, timeout_s=60)


def config_for(path: str = "tiny", **training: object) -> Config:
    """A configuration for tiny models in fp32."""
    config = Config()
    config.model.path = path
    config.training.dtype = "float32"
    config.training.seq_len, config.training.tokens_per_micro_batch = 64, 256
    for key, value in training.items():
        setattr(config.training, key, value)
    return config


def lone_policy(config: Config) -> Policy:
    ranks = lone_rank()
    return load_policy(config, ranks, make_mesh(config.parallelism, ranks))


def save_random_model(folder: Path, architecture: str, **overrides: object) -> str:
    """A small random model of one architecture as a Hugging Face folder."""
    import transformers

    sizes = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    if architecture == "Qwen3":
        sizes["head_dim"] = 8
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():  # away from the flat start, where mistakes hide
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


def random_groups(
    num: int, size: int, *, seed: int = 0, vocabulary: int = 50, longest: int = 12, version: int = 0, lags: int = 1
) -> list[Group]:
    """Groups of random tokens with plausible log-probabilities; versions from `version - lags + 1` to `version`."""
    rng = np.random.default_rng(seed)

    def one() -> Episode:
        length = int(rng.integers(1, longest + 1))
        mask = rng.random(length) < 0.9
        mask[-1] = True
        versions = np.where(mask, version - rng.integers(0, lags, length), -1)
        return Episode(
            prompt_ids=prompt_ids,
            token_ids=rng.integers(4, vocabulary, length).astype(np.int32),
            logprobs=np.where(mask, -3 - rng.random(length), 0).astype(np.float32),
            versions=versions.astype(np.int32),
            loss_mask=mask,
            reward=float(rng.integers(0, 2)),
            finish_reason="stop",
        )

    groups = []
    for index in range(num):
        prompt_ids = rng.integers(4, vocabulary, int(rng.integers(1, 9))).astype(np.int32)
        prompt = Prompt(id=index, prompt="")
        groups.append(Group(lease_id=index, prompt=prompt, episodes=[one() for _ in range(size)]))
    return groups


def gradients(learner: Learner, sequences: Sequences) -> dict[str, torch.Tensor]:
    """Whole gradients of the first minibatch, by name; collective."""
    totals = Totals()
    minibatches = micro_batches(sequences, config=learner.config, ranks=learner.ranks)
    references = learner.ask_reference(minibatches)
    for micro in learner._before(minibatches)[0]:
        learner.accumulate(with_reference(micro, references), totals)
    named = {n: p.grad.full_tensor().clone() for n, p in learner.policy.named_parameters() if p.grad is not None}
    learner.optimizer.zero_grad()
    return named


def make_learner(algo: Algorithm, config: Config, ranks: Ranks, *, reference: Reference | None = None) -> Learner:
    policy = load_policy(config, ranks, make_mesh(config.parallelism, ranks))
    return Learner(policy=policy, algo=algo, config=config, ranks=ranks, reference=reference)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(script: str, num_ranks: int, *arguments: str, timeout_s: float = 120) -> None:
    """Run a Python script as `num_ranks` processes of one world; raises with their output when one fails."""
    port = free_port()
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [output for process, output in zip(processes, outputs, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
