"""The clients' ends: when they ask again, what they keep of a request, and batches that are asked for ahead."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import numpy as np
import pytest
from replay_helpers import answer, make_group, make_run, run_async, serving

from asyncrl.replay import exchange, frames, messages, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.training.prefetch import Prefetch


def test_request_that_has_left_is_given_time_before_it_is_asked_after() -> None:
    request = exchange.Exchange(exchange.Session("trainer", 0, "tcp://127.0.0.1:9"), messages.Status(), (), 100.0)
    assert request.wait_s() == exchange.CONNECT_S
    request.outgoing = None
    assert request.wait_s() == exchange.ASK_AGAIN_S


def test_kept_message_is_the_same_and_holds_nothing_of_its_sender() -> None:
    body = np.arange(1000, dtype=np.uint8)
    original = weakref.ref(body)
    kept = frames.keep([b"head", body.data])
    assert [bytes(f) for f in kept] == [b"head", np.arange(1000, dtype=np.uint8).tobytes()]
    del body
    assert original() is None


def test_insert_waits_without_its_packed_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[weakref.ref] = []
    pack = wire.pack_group

    def watched(group: object) -> list[wire.Frame]:
        made = pack(group)  # type: ignore[arg-type]
        assert isinstance(made[1], memoryview)
        packed.append(weakref.ref(made[1].obj))
        return made

    async def insert(client: AsyncReplayClient) -> None:
        (lease,) = await client.lease(1)
        monkeypatch.setattr(wire, "pack_group", watched)
        waiting = asyncio.ensure_future(client.insert(make_group(lease.id, versions=[0], length=500)))
        await asyncio.sleep(0)  # it is sent by now, and not yet answered
        assert not waiting.done()
        assert packed[0]() is None
        assert await waiting

    with serving(make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        run_async(insert, made.address)
        trainer.close()


def test_cancelled_request_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ASK_AGAIN_S", 0.1)

    async def cancel_one(client: AsyncReplayClient) -> None:
        never = asyncio.ensure_future(client.lookup("never", 100))
        late = asyncio.ensure_future(client.lookup("late", 0.5))
        await client.hello()
        never.cancel()
        with pytest.raises(TimeoutError, match="has waited"):
            await late
        await client.heartbeat({})

    with serving(make_run(str(tmp_path), training={"batch_size": 1})) as made:
        run_async(cancel_one, made.address)


def test_batches_that_were_begun_ahead_come_in_order_until_the_data_ends(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), total=4, training={"batch_size": 2, "steps": 3}, target_lag=1)

    async def generate(client: AsyncReplayClient) -> None:
        await answer(client, await client.lease(4))

    async def find_no_more(client: AsyncReplayClient) -> None:
        assert await client.lease(1) == []

    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        run_async(generate, made.address)
        prefetch = Prefetch(ReplayClient(made.address, role="prefetch"), num_groups=2, limit_s=20)
        for step in (1, 2, 3, 4):
            prefetch.begin(step)
        batches = [prefetch.poll(20), prefetch.poll(20)]
        trainer.publish(version=1, step=1)
        run_async(find_no_more, made.address)
        batches.append(prefetch.poll(20))
        assert [[g.prompt.id for g in taken.groups] for taken in batches if taken] == [[0, 1], [2, 3], []]
        prefetch._thread.join(20)
        assert not prefetch._thread.is_alive()
        trainer.close()
