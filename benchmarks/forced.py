"""A forced lag with the engine's own parts: what `staleness_engine.py` compares the asynchronous engine with.

One process, no sockets: the same model, local engine, rollout loop, environment and optimiser step as `asyncrl train`.
Each step samples a batch from the present weights into a queue and trains on the one from `depth` steps ago; in the
first steps on batches of the initial weights, so a token's lag is min(step, depth). With depth 0 it is the plain
synchronous loop that tests/sync_reference.py holds the engine to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch

from asyncrl.chat import Chat
from asyncrl.generation.local import LocalEngine
from asyncrl.generation.rollout import RolloutLoop
from asyncrl.replay.messages import Lease
from asyncrl.settings import Run, save
from asyncrl.training.batch import prepare
from asyncrl.training.member import Member
from asyncrl.training.model import published
from asyncrl.training.ranks import join_ranks
from asyncrl.types import Group, Prompt


class Basket:
    """Takes the place of the replay client: groups that are inserted lie here."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    async def lease(self, n: int) -> list[Lease]:
        return []

    async def insert(self, group: Group) -> bool:
        self.groups.append(group)
        return True

    async def drop(self, lease_id: int, reason: str, **more: object) -> None:
        raise RuntimeError(f"a group was dropped, {reason}: {more}")


def train(run: Run, depth: int) -> np.ndarray:
    """Mean reward of each trained batch, (steps,), at a lag of `depth`."""
    torch.set_num_threads(1)
    save(run)
    member = Member(run, join_ranks(with_gpus=False, timeout_s=60))
    try:
        return asyncio.run(_loop(run, member, depth))
    finally:
        member.checkpoints.close()
        member.sender.close()


async def _loop(run: Run, member: Member, depth: int) -> np.ndarray:
    engine, basket, rewards = LocalEngine.of_config(run.config), Basket(), []
    await engine.start()
    chat = Chat(tokenizer=member.tokenizer)

    async def score(text: str, prompt: Prompt) -> object:
        return run.env.score(text, prompt)

    rollouts = RolloutLoop(
        engine=engine, env=run.env, algo=run.algo, client=basket, chat=chat, config=run.config, score=score
    )
    leases = _leases(run)
    batch_size, queue = run.config.training.batch_size, []
    try:
        for version in range(run.config.training.steps):
            weights = [(name, tensor.full_tensor()) for name, tensor in published(member.policy, torch.float32)]
            await engine.load_weights(weights, version)
            for _ in range(1 + (depth if version == 0 else 0)):  # at first the queue is filled by the initial weights
                chosen = [next(leases) for _ in range(batch_size)]
                await asyncio.gather(*(rollouts.group(lease) for lease in chosen))
                queue.append(sorted(basket.groups, key=lambda group: group.lease_id))
                basket.groups = []
            groups = queue.pop(0)
            rewards.append(np.mean([group.rewards_G.mean() for group in groups]))
            sequences = prepare(groups, algo=run.algo, config=run.config, step=version + 1, version=version)
            member.learner.train(sequences, step=version + 1)
    finally:
        await engine.close()
    return np.array(rewards)


def _leases(run: Run) -> Iterator[Lease]:
    prompts = iter(run.env.prompts())
    return (Lease(id=i, prompt=next(prompts), version=0, attempt=1) for i in count())
