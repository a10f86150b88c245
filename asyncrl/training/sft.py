"""Supervised training on demonstrations: the warm-up of the demo's model, and `asyncrl sft`.

The same packed forward, sharding and optimiser as reinforcement learning; the loss is the mean negative log-probability
of the responses' tokens. Every rank draws the same demonstrations and computes its own part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

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

WARMUP_BATCH = 128
"""Demonstrations per step of a warm-up."""
TINY_RATE = 3e-3
"""Learning rate of the tiny model's warm-up."""


def examples(env: Env, chat: Chat) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Demonstrations as (token ids, mask of the trained ones): prompt, then response and EOS, which are trained."""
    for prompt, response in env.demonstrations():
        before = chat.encode(prompt)
        after = [*chat.tokenizer.encode(response, add_special_tokens=False), chat.tokenizer.eos_token_id]
        ids = np.array([*before, *after], dtype=np.int64)
        yield ids, np.arange(len(ids)) >= len(before)


def train_on_demonstrations(
    policy: Policy,
    *,
    env: Env,
    chat: Chat,
    config: TrainingConfig,
    ranks: Ranks,
    steps: int,
    batch_size: int,
    rate: Callable[[int], float],
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """`steps` optimiser steps of AdamW at `rate(step)`; returns the last loss. Collective over the ranks.

    Raises NotImplementedError when the environment has no demonstrations and ValueError when one is too long.
    """
    optimizer, stream, loss = make_optimizer(policy, config), examples(env, chat), float("nan")
    for step in range(1, steps + 1):
        batch = list(islice(stream, batch_size))
        if not batch:
            raise ValueError(f"{type(env).__name__} ran out of demonstrations at step {step} of {steps}")
        loss = _step(policy, batch, config=config, ranks=ranks)
        apply_gradients(policy, optimizer, rate=rate(step), max_norm=config.max_grad_norm)
        on_step(step, loss)
    return loss


def _step(policy: Policy, batch: list[tuple[np.ndarray, np.ndarray]], *, config: TrainingConfig, ranks: Ranks) -> float:
    """Forward and backward over this rank's part; the loss of the whole batch."""
    longest = max(len(ids) for ids, _ in batch)
    if longest > config.seq_len:
        raise ValueError(f"a demonstration of {longest} tokens is longer than training.seq_len = {config.seq_len}")
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
