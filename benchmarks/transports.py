"""The ways through which `benchmarks/replay.py` sends groups: per kind a middle process, a producer and a consumer.

A producer function owns `sockets` connections and runs until `stop` is set, then puts its latencies into `results`. A
consumer function connects and returns `take`, which waits for one batch, unpacks it and returns its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq

from asyncrl.config import CheckpointConfig, Config, ReplayConfig, TrainingConfig
from asyncrl.env import Env
from asyncrl.memory import keep_freed_memory
from asyncrl.replay import server, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.messages import Lease
from asyncrl.training.prefetch import Prefetch
from asyncrl.types import Episode, Group, Prompt

keep_freed_memory()  # in every process of every way, as the roles of a run do: none is slower for its malloc
BATCH = 32
WINDOW = 4
"""Unanswered groups per producer."""
EPISODES = 8
SPAWN = multiprocessing.get_context("spawn")


class Endless(Env):
    """Prompts without content."""

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        while True:
            yield Prompt(id=start, prompt="p")
            start += 1


_MADE: dict[int, Group] = {}


def make_group(lease_id: int, kilobytes: int, version: int = 0) -> Group:
    """A group of `kilobytes` KB, made once per process; only what differs is set anew."""
    group = _MADE.get(kilobytes) or _MADE.setdefault(kilobytes, _new_group(kilobytes))
    group.lease_id = lease_id
    for episode in group.episodes:
        episode.versions.fill(version)
    return group


def _new_group(kilobytes: int) -> Group:
    """13 bytes per token."""
    length = kilobytes * 1024 // (13 * EPISODES)
    episodes = [
        Episode(
            prompt_ids=np.arange(16, dtype=np.int32),
            token_ids=np.arange(length, dtype=np.int32),
            logprobs=np.full(length, -0.5, np.float32),
            versions=np.zeros(length, np.int32),
            loss_mask=np.ones(length, bool),
            reward=float(i % 2),
            finish_reason="stop",
        )
        for i in range(EPISODES)
    ]
    return Group(lease_id=-1, prompt=Prompt(id=0, prompt="p"), episodes=episodes)


# The real server


def replay_server(address_dir: str, kind: str, stop: Event) -> None:
    config = Config(
        run_dir=address_dir,
        training=TrainingConfig(batch_size=BATCH, steps=10**9),
        replay=ReplayConfig(
            target_lag=14,
            max_lag=30,
            capacity_groups=16 * BATCH,
            capacity_bytes=1 << 30,
            journal=kind == "journal",
            share_files=kind != "sockets",
        ),
        checkpoint=CheckpointConfig(every=10),
    )
    server.serve(SimpleNamespace(config=config, env=Endless()), stop)


def replay_producer(address: str, index: int, sockets: int, kilobytes: int, stop: Event, results: Any) -> None:
    latencies: list[float] = []
    running = True

    async def one(number: int) -> None:
        client = AsyncReplayClient(address, index=number)
        await client.hello()
        asyncio.get_running_loop().create_task(beat(client))

        leases, asking = deque[Lease](), asyncio.Lock()

        async def work() -> None:
            while running:
                if not leases:
                    async with asking:  # one request at a time, as a generator
                        leases.extend(() if leases else await client.lease(8))
                if leases:
                    lease, start = leases.popleft(), time.perf_counter()
                    await client.insert(make_group(lease.id, kilobytes, lease.version))
                    latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(work() for _ in range(WINDOW)))

    async def beat(client: AsyncReplayClient) -> None:
        while True:
            await client.heartbeat({})
            await asyncio.sleep(2)

    async def main() -> None:
        nonlocal running
        with contextlib.suppress(TimeoutError):
            work = asyncio.gather(*(one(index * 1000 + i) for i in range(sockets)))
            while not stop.is_set():
                await asyncio.sleep(0.1)
            running = False
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    asyncio.run(main())
    results.put(latencies)


def replay_consumer(address: str, journal: bool) -> Callable[[], int]:
    client = ReplayClient(address, role="trainer")
    client.publish(version=0, step=0)
    prefetch = Prefetch(ReplayClient(address, role="prefetch"), num_groups=BATCH, limit_s=60)  # as the trainer does
    step = 0

    def take() -> int:
        nonlocal step
        if not step:
            prefetch.begin(1)
        step += 1
        prefetch.begin(step + 1)
        taken = prefetch.poll(60)
        if taken is None:
            raise TimeoutError("no batch in 60 s")
        client.publish(version=step, step=step)
        if journal and step % 2 == 0:
            client.forget(step=step - 2)
        return sum(g.nbytes for g in taken.groups)

    return take


# A bare ZeroMQ pair


def bare_server(address_dir: str, kind: str, stop: Event) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    server.write_address(Path(address_dir), f"tcp://127.0.0.1:{port}")
    stored: list[list[zmq.Frame]] = []
    waiting: list[bytes] = []
    held: list[bytes] = []
    while not stop.is_set():
        if not router.poll(100):
            continue
        while True:
            try:
                identity, kind, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if kind.bytes == b"take":
                waiting.append(identity.bytes)
            else:
                stored.append(frames)
                if len(stored) < 15 * BATCH:
                    router.send_multipart([identity.bytes, b"ok"])
                else:
                    held.append(identity.bytes)
            while waiting and len(stored) >= BATCH:
                batch, stored = stored[:BATCH], stored[BATCH:]
                router.send_multipart([waiting.pop(), *(f for group in batch for f in group)], copy=False)
                for identity_ in held:
                    router.send_multipart([identity_, b"ok"])
                held.clear()
    context.destroy(0)


def bare_producer(address: str, index: int, sockets: int, kilobytes: int, stop: Event, results: Any) -> None:
    context, latencies = zmq.Context(), []
    dealers = [context.socket(zmq.DEALER) for _ in range(sockets)]
    poller = zmq.Poller()
    started: dict[zmq.Socket, list[float]] = {}

    def send(dealer: zmq.Socket) -> None:
        started[dealer].append(time.perf_counter())
        dealer.send_multipart([b"insert", *wire.pack_group(make_group(0, kilobytes))])

    for dealer in dealers:
        dealer.connect(address)
        poller.register(dealer, zmq.POLLIN)
        started[dealer] = []
        for _ in range(WINDOW):
            send(dealer)
    while not stop.is_set():
        for dealer, _ in poller.poll(100):
            dealer.recv()
            latencies.append(time.perf_counter() - started[dealer].pop(0))
            send(dealer)
    context.destroy(0)
    results.put(latencies)


def bare_consumer(address: str, journal: bool) -> Callable[[], int]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)

    def take() -> int:
        dealer.send(b"take")
        frames = dealer.recv_multipart(copy=False)
        groups = [wire.unpack_group(frames[i : i + 2]) for i in range(0, len(frames), 2)]  # a batch, whole, as ours
        return sum(group.nbytes for group in groups)

    return take


# multiprocessing.Queue


def queue_producer(queue: Any, index: int, sockets: int, kilobytes: int, stop: Event, results: Any) -> None:
    latencies = []
    while not stop.is_set():
        start = time.perf_counter()
        queue.put(make_group(0, kilobytes))
        latencies.append(time.perf_counter() - start)
    queue.cancel_join_thread()
    results.put(latencies)


# Redis streams


@contextlib.contextmanager
def redis_server(folder: str, aof: bool) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    persist = ["--appendonly", "yes", "--appendfsync", "no"] if aof else ["--appendonly", "no"]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder, *persist]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield str(port), process.pid
    finally:
        process.terminate()
        process.wait(20)


def redis_client(port: str) -> Any:
    import redis

    client = redis.Redis(port=int(port))
    deadline = time.monotonic() + 10
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def redis_producer(port: str, index: int, sockets: int, kilobytes: int, stop: Event, results: Any) -> None:
    latencies: list[float] = []

    def one() -> None:
        client = redis_client(port)
        while not stop.is_set():
            if client.xlen("groups") > 15 * BATCH:
                time.sleep(0.002)
                continue
            start = time.perf_counter()
            frames = wire.pack_group(make_group(0, kilobytes))
            client.xadd("groups", {str(i): bytes(f) for i, f in enumerate(frames)})
            latencies.append(time.perf_counter() - start)

    threads = [threading.Thread(target=one) for _ in range(sockets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(latencies)


def redis_consumer(port: str, journal: bool) -> Callable[[], int]:
    client, last = redis_client(port), b"0"

    def take() -> int:
        nonlocal last
        total, entries = 0, []
        while len(entries) < BATCH:
            for _, found in client.xread({"groups": last}, count=BATCH - len(entries), block=1000):
                entries += found
                last = found[-1][0]
        for _, fields in entries:
            total += wire.unpack_group([fields[str(i).encode()] for i in range(2)]).nbytes
        client.xdel("groups", *(key for key, _ in entries))
        return total

    return take
