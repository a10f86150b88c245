"""Messages that come late, twice, in another order, damaged or not at all: nothing is lost, doubled or changed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zmq
from chaos_proxy import badly
from replay_helpers import make_group, make_run, serving

from asyncrl.config import SuperviseConfig
from asyncrl.replay import exchange as exchange_module
from asyncrl.replay import messages, spool
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import Session
from asyncrl.types import Group

P, STEPS, TARGET_LAG = 4, 10, 2
DROPPED = 7
"""Prompts whose id is a multiple of this are dropped by their generator."""


def group_of(lease_id: int, prompt_id: int, version: int) -> Group:
    """A group whose content follows from its prompt."""
    group = make_group(lease_id, versions=[version] * 2, length=2000, prompt_id=prompt_id)
    for episode in group.episodes:
        episode.token_ids[:] = np.random.default_rng(prompt_id).integers(0, 1000, 2000)
    return group


async def generate(address: str, index: int) -> None:
    client = AsyncReplayClient(address, index=index)
    await client.hello()

    async def end(lease) -> None:
        if lease.prompt.id % DROPPED == 0:
            await client.drop(lease.id, "filtered", num_tokens=5)
        else:
            await client.insert(group_of(lease.id, lease.prompt.id, lease.version))

    try:
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            while leases := await client.lease(3):
                await client.heartbeat({"tokens": 1.0})
                for lease in leases:
                    tasks.create_task(end(lease))
    finally:
        client.close()


def train(address: str) -> list[Group]:
    """Every group of every step, as the trainer got it."""
    trainer, groups = ReplayClient(address, role="trainer"), []
    trainer.rewind(step=0, version=0)
    trainer.publish(version=0, step=0)
    for step in range(1, STEPS + 1):
        taken = trainer.take(step=step, num_groups=P, version=step - 1, timeout_s=60)
        assert taken.metrics["ledger/balance"] == taken.metrics["ledger_tokens/balance"] == 0
        assert all(0 <= step - 1 - v <= TARGET_LAG + 2 for g in taken.groups for v in g.episodes[0].versions)
        groups += taken.groups
        trainer.publish(version=step, step=step)
    trainer.finish("done")
    trainer.close()
    return groups


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "least_bytes"), [(1, spool.LEAST_BYTES), (2, 0)])
def test_a_bad_network_loses_doubles_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, least_bytes: int
) -> None:
    """With `least_bytes` 0, groups lie in files, which are written over after a few of them."""
    monkeypatch.setattr(exchange_module, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(spool, "LEAST_BYTES", least_bytes)
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 120_000)
    run = make_run(str(tmp_path), training={"batch_size": P, "steps": STEPS}, target_lag=TARGET_LAG)
    with serving(run) as made, badly(made.address, seed=seed) as proxy:
        generators = [threading.Thread(target=lambda i=i: asyncio.run(generate(proxy.address, i))) for i in range(2)]
        for thread in generators:
            thread.start()
        groups = train(proxy.address)
        for thread in generators:
            thread.join(60)
            assert not thread.is_alive()
        status = ReplayClient(made.address, role="status")
        report = status.status()
        status.close()
    assert min(proxy.faults[fault] for fault in ("drop", "damage", "duplicate", "delay")) > 0, proxy.faults
    counts = Counter(g.prompt.id for g in groups)
    assert sorted(counts) == [i for i in range(max(counts) + 1) if i % DROPPED]
    assert set(counts.values()) == {1}
    for group in groups:
        for episode, sent in zip(group.episodes, group_of(0, group.prompt.id, 0).episodes, strict=True):
            np.testing.assert_array_equal(episode.token_ids, sent.token_ids)
            np.testing.assert_array_equal(episode.logprobs, sent.logprobs)
    assert report["malformed"] > 0
    assert report["ledger"]["ledger/balance"] == 0
    assert report["ledger"]["ledger/trained"] == P * STEPS


def test_a_generator_that_fell_silent_does_not_get_its_leases_back_through_a_parked_request(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=0)
    run.config.supervise = SuperviseConfig(dead_after_s=1.5)
    context = zmq.Context()
    with serving(run) as made, context.socket(zmq.DEALER) as silent:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        silent.connect(made.address)
        session = Session("generator", 0, "")
        silent.send_multipart(session.pack(session.begin(), messages.AskLease(n=2)))
        assert silent.poll(10_000)
        silent.send_multipart(session.pack(session.begin(), messages.AskLease(n=2)))  # parked, and no word after it

        async def take_over() -> list[int]:
            client, prompts = AsyncReplayClient(made.address, index=1), []
            await client.hello()
            async with asyncio.timeout(30):
                while len(prompts) < 2:
                    prompts += [lease.prompt.id for lease in await client.lease(2)]
            client.close()
            return prompts

        assert asyncio.run(take_over()) == [0, 1]
        trainer.close()
    context.term()
