"""The oracle of `target_lag 0`: a plain synchronous loop without processes, sockets or threads of ours.

Sample P groups from the present weights, train on them, repeat. The same engine, environment and step functions as the
asynchronous run; on CPU with one generator and one rank its losses must be equal bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import torch

from asyncrl.chat import Chat
from asyncrl.generation.local import LocalEngine
from asyncrl.generation.rollout import RolloutLoop
from asyncrl.replay.messages import Lease
from asyncrl.settings import Run, save
from asyncrl.training.batch import prepare
from asyncrl.training.member import Member
from asyncrl.training.model import published
from asyncrl.training.ranks import Ranks
from asyncrl.types import Group, Prompt


class Basket:
    """Takes the place of the replay client: what the rollout loop inserts lies here."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.dropped: list[str] = []

    async def lease(self, n: int) -> list[Lease]:
        return []

    async def insert(self, group: Group) -> bool:
        self.groups.append(group)
        return True

    async def drop(self, lease_id: int, reason: str, **more: object) -> None:
        self.dropped.append(reason)


def train_synchronously(run: Run, ranks: Ranks) -> list[dict[str, float]]:
    """The rows of `run.config.training.steps` steps, each with the learner's metrics."""
    save(run)
    member = Member(run, ranks)
    try:
        return asyncio.run(_loop(run, member))
    finally:
        member.checkpoints.close()
        member.sender.close()


async def _loop(run: Run, member: Member) -> list[dict[str, float]]:
    engine = LocalEngine.of_config(run.config)
    await engine.start()
    prompts, rows = iter(run.env.prompts()), []
    try:
        for version in range(run.config.training.steps):
            await engine.load_weights(
                [(n, t.full_tensor()) for n, t in published(member.policy, torch.float32)], version
            )
            groups = await _sample(run, member, engine, prompts)
            step = version + 1
            sequences = prepare(groups, algo=run.algo, config=run.config, step=step, version=version)
            rows.append(member.learner.train(sequences, step=step))
    finally:
        await engine.close()
    return rows


async def _sample(run: Run, member: Member, engine: LocalEngine, prompts: Iterator[Prompt]) -> list[Group]:
    """Groups of the next prompts, one after the other, until a batch of them was kept."""
    basket = Basket()
    rollouts = RolloutLoop(
        engine=engine,
        env=run.env,
        algo=run.algo,
        client=basket,
        chat=Chat(tokenizer=member.tokenizer),
        config=run.config,
        score=_score(run),
    )
    for lease_id in count():
        if len(basket.groups) == run.config.training.batch_size:
            return basket.groups
        lease = Lease(id=lease_id, prompt=next(prompts), version=engine.version, attempt=1)
        await rollouts.group(lease)
    raise AssertionError


def _score(run: Run):
    async def score(text: str, prompt: Prompt):
        return run.env.score(text, prompt)

    return score
