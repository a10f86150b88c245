"""Builders shared by the replay tests: groups, limits, buffers, prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from asyncrl.config import Config, ReplayConfig, TrainingConfig
from asyncrl.env import Env
from asyncrl.replay import server, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.limiter import Limits, make_limits
from asyncrl.replay.messages import Lease
from asyncrl.replay.parcel import Parcel, parcel_of
from asyncrl.replay.samplers import SAMPLERS
from asyncrl.types import Episode, Group, Prompt


class Counting(Env):
    """Prompts "0", "1", ...; `total` of them, or endless."""

    total: int | None = None

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        i = start
        while self.total is None or i < self.total:
            yield Prompt(id=i, prompt=str(i), target=i)
            i += 1


def make_group(
    lease_id: int, *, versions: list[int], length: int = 3, reward: float = 1.0, prompt_id: int = 0
) -> Group:
    """One episode per entry of `versions`, all of whose tokens have that version."""
    episodes = [
        Episode(
            prompt_ids=np.arange(2, dtype=np.int32),
            token_ids=np.arange(length, dtype=np.int32),
            logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, version, np.int32),
            loss_mask=np.full(length, version >= 0),
            reward=reward + i,
            finish_reason="stop",
            text="abc",
        )
        for i, version in enumerate(versions)
    ]
    return Group(lease_id=lease_id, prompt=Prompt(id=prompt_id, prompt=str(prompt_id)), episodes=episodes)


def make_parcel(lease_id: int, **arguments: object) -> Parcel:
    return parcel_of(wire.pack_group(make_group(lease_id, **arguments)))  # type: ignore[arg-type]


def limits_of(
    *, P: int = 2, steps: int = 1000, sync_interval: int = 1, max_filtered: int = 1000, **replay: object
) -> Limits:
    training = TrainingConfig(batch_size=P, steps=steps, sync_interval=sync_interval)
    return make_limits(ReplayConfig(max_filtered=max_filtered, **replay), training)  # type: ignore[arg-type]


def make_buffer(*, order: str = "window", total: int | None = None, live: bool = True, **limits: object) -> Buffer:
    buffer = Buffer(
        limits=limits_of(order=order, **limits),  # type: ignore[arg-type]
        prompts=Counting(total=total).prompts(),
        sampler=SAMPLERS[order],  # type: ignore[index]
    )
    if live:
        buffer.publish(version=0, step=0)
    return buffer


def lease_all(buffer: Buffer, n: int = 10_000, *, owner: str = "g", now: float = 0.0) -> list[int]:
    """Lease ids of all that there is room for."""
    return [seat.lease_id for seat in buffer.lease(n, owner=owner, request=0, now=now)]


def make_run(
    run_dir: str, *, total: int | None = None, training: dict | None = None, **replay: object
) -> SimpleNamespace:
    """What `serve` needs of a resolved run."""
    config = Config(run_dir=run_dir, training=TrainingConfig(**(training or {})), replay=ReplayConfig(**replay))  # type: ignore[arg-type]
    return SimpleNamespace(config=config, env=Counting(total=total), algo=None)


@contextmanager
def serving(run: object, bind: str = "tcp://127.0.0.1:*") -> Iterator[server.Server]:
    """A server in a thread of this process; an error that ends it fails the test."""
    made = server.open_server(run, bind=bind)
    stop, errors = threading.Event(), []

    def serve() -> None:
        try:
            made.run(stop)
        except BaseException as error:  # noqa: BLE001  handed to the test's thread
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(10)
        made.close()
        if errors:
            raise errors[0]


def run_async(work: Callable[[AsyncReplayClient], Awaitable[object]], address: str, *, index: int = 0) -> object:
    """One coroutine with a client of its own, bounded."""

    async def main() -> object:
        client = AsyncReplayClient(address, index=index)
        try:
            return await asyncio.wait_for(work(client), 30)
        finally:
            client.close()

    return asyncio.run(main())


async def answer(client: AsyncReplayClient, leases: list[Lease]) -> None:
    for lease in leases:
        assert await client.insert(make_group(lease.id, versions=[lease.version], prompt_id=lease.prompt.id))
