"""Supervised training on demonstrations: the warm-up of the demo's model, and `asyncrl sft`.

The same packed forward, sharding and optimiser as reinforcement learning; the loss is the mean negative log-probability
of the responses' tokens. Every rank draws the same demonstrations and computes its own part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from asyncrl.chat import Chat
from asyncrl.config import TrainingConfig
from asyncrl.env import Env
from asyncrl.training.attention import packed_input
from asyncrl.training.model import Policy
from asyncrl.training.optimizer import apply_gradients, make_optimizer
from asyncrl.training.packing import pack, plan
from asyncrl.training.ranks import Ranks
from asyncrl.training.totals import Totals
from asyncrl.types import Refusal

WARMUP_BATCH = 128
"""Demonstrations per step of a warm-up."""
TOO_MANY = 1000
"""So many demonstrations in a row that are too long end the training: the next are hardly shorter."""
Example = tuple[np.ndarray, np.ndarray]
"""Token ids, and which of them are trained; both (S,)."""
TINY_RATE = 3e-3
"""Learning rate of the tiny model's warm-up."""


def examples(env: Env, chat: Chat) -> Iterator[Example]:
    """Demonstrations as (token ids, mask of the trained ones): prompt, then response and EOS, which are trained."""
    for prompt, response in env.demonstrations():
        before = chat.encode(prompt)
        after = [*chat.tokenizer.encode(response, add_special_tokens=False), chat.tokenizer.eos_token_id]
        ids = np.array([*before, *after], dtype=np.int64)
        yield ids, np.arange(len(ids)) >= len(before)


class Demonstrations:
    """An environment's demonstrations, in batches. Those of more than `longest` tokens are left out and counted."""

    def __init__(self, env: Env, chat: Chat, *, longest: int) -> None:
        self._stream, self._longest = examples(env, chat), longest
        self.num_read = 0
        self.num_too_long = 0

    def take(self, num: int) -> list[Example]:
        """The next `num`; fewer where they end. Raises Refusal after TOO_MANY in a row that are too long."""
        batch: list[Example] = []
        in_vain: list[int] = []
        while len(batch) < num and (example := next(self._stream, None)) is not None:
            self.num_read += 1
            length = len(example[0])
            if length <= self._longest:
                batch.append(example)
                in_vain.clear()
                continue
            self.num_too_long += 1
            in_vain.append(length)
            if len(in_vain) == TOO_MANY:
                raise Refusal(
                    f"the last {TOO_MANY} demonstrations are longer than training.seq_len {self._longest}: with its "
                    f"prompt the shortest has {min(in_vain)} tokens; raise training.seq_len"
                )
        return batch


def train_on_demonstrations(
    policy: Policy,
    *,
    demonstrations: Demonstrations,
    config: TrainingConfig,
    ranks: Ranks,
    steps: int,
    batch_size: int,
    rate: Callable[[int], float],
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[int, float]:
    """`steps` optimiser steps of AdamW at `rate(step)`, fewer where the demonstrations end. Returns how many, and the
    last loss. Collective over the ranks.

    Raises NotImplementedError when the environment has no demonstrations and Refusal when none can be trained on.
    """
    optimizer, loss = make_optimizer(policy, config), float("nan")
    for step in range(1, steps + 1):
        batch = demonstrations.take(batch_size)
        if not batch and step == 1:
            left_out = f": all {n} are longer than training.seq_len" if (n := demonstrations.num_too_long) else ""
            raise Refusal(f"there is no demonstration to train on{left_out}")
        if not batch:
            return step - 1, loss
        loss = _step(policy, batch, config=config, ranks=ranks)
        apply_gradients(policy, optimizer, rate=rate(step), max_norm=config.max_grad_norm)
        on_step(step, loss)
    return steps, loss


def _step(policy: Policy, batch: list[Example], *, config: TrainingConfig, ranks: Ranks) -> float:
    """Forward and backward over this rank's part; the loss of the whole batch."""
    total = sum(int(mask.sum()) for _, mask in batch)
    lengths = [len(ids) for ids, _ in batch]
    dealt = plan(lengths, num_ranks=ranks.size, budget=config.tokens_per_micro_batch)
    totals = Totals()
    for members in dealt[ranks.rank]:
        packed = pack([batch[i][0] for i in members], [batch[i][1] for i in members])
        inputs = packed_input(packed, ranks.device, policy.kind)
        loss = -policy(inputs)[0].sum() / total
        loss.backward()
        totals.add("loss", loss)
    return totals.over_ranks(ranks).number("loss")


def warm_up_rate(path: str, config: TrainingConfig) -> float:
    """The learning rate of a warm-up: large for the tiny model, which starts from nothing; the run's own otherwise."""
    return TINY_RATE if path == "tiny" else config.learning_rate


def seed_all(seed: int) -> None:
    """The warm-up's randomness depends on the seed alone."""
    torch.manual_seed(seed)
