"""What the replay server costs: the same groups through it, through a bare ZeroMQ pair, a pickling queue, and Redis.

    python benchmarks/replay.py [--smoke] [--producers 1,8,64] [--sizes 16,256,4096] [--seconds 4] [--only replay,bare]

Producers pack groups of 8 episodes and send them, at most WINDOW unanswered each; one consumer takes batches of 32
groups and unpacks them. Rows:

    replay     the real server, its clients, leases, admission and ledger; no journal
    journal    the same with the journal on disk; the consumer lets it forget as a trainer with checkpoints would
    bare       a ROUTER that acknowledges each group and hands out batches: the same frames, no other work
    queue      multiprocessing.Queue of Group objects, so pickle (used here to compare with, nowhere else)
    redis      Redis streams, one entry per group, nothing on disk; needs redis-server and its Python client
    redis-aof  the same with its append-only file

Prints a table, then one line of JSON. MB/s count the frames of groups that the consumer unpacked. "server" is the CPU
time of the middle process per group, "all" that of every process, which also compares on a busy machine; the latency of
an insert is from packing to its acknowledgement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import zmq

from asyncrl.config import CheckpointConfig, Config, ReplayConfig, TrainingConfig
from asyncrl.env import Env
from asyncrl.replay import server, wire
from asyncrl.replay.client import AsyncReplayClient, ReplayClient
from asyncrl.types import Episode, Group, Prompt

BATCH = 32
WINDOW = 4
"""Unanswered groups per producer."""
EPISODES = 8
MAX_PROCESSES = 8
"""More producers than this share processes, each with a socket of its own."""
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


def replay_server(address_dir: str, journal: bool, stop: Event) -> None:
    config = Config(
        run_dir=address_dir,
        training=TrainingConfig(batch_size=BATCH, steps=10**9),
        replay=ReplayConfig(target_lag=14, capacity_groups=16 * BATCH, capacity_bytes=1 << 30, journal=journal),
        checkpoint=CheckpointConfig(every=10),
    )
    server.serve(SimpleNamespace(config=config, env=Endless()), stop)


def replay_producer(address: str, index: int, sockets: int, kilobytes: int, stop: Event, results: Any) -> None:
    latencies: list[float] = []

    async def one(number: int) -> None:
        client = AsyncReplayClient(address, index=number)
        await client.hello()
        asyncio.get_running_loop().create_task(beat(client))

        async def work() -> None:
            while not stop.is_set():
                for lease in await client.lease(8):
                    start = time.perf_counter()
                    await client.insert(make_group(lease.id, kilobytes, lease.version))
                    latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(work() for _ in range(WINDOW)))

    async def beat(client: AsyncReplayClient) -> None:
        while True:
            await client.heartbeat({})
            await asyncio.sleep(2)

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            work = asyncio.gather(*(one(index * 1000 + i) for i in range(sockets)))
            while not stop.is_set():
                await asyncio.sleep(0.1)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    asyncio.run(main())
    results.put(latencies)


def replay_consumer(address: str, journal: bool) -> Callable[[], int]:
    client = ReplayClient(address, role="trainer")
    client.publish(version=0, step=0)
    step = 0

    def take() -> int:
        nonlocal step
        step += 1
        taken = client.take(step=step, num_groups=BATCH, version=step - 1, timeout_s=60)
        client.publish(version=step, step=step)
        if journal and step % 10 == 0:
            client.forget(step=step - 10)
        return sum(g.nbytes for g in taken.groups)

    return take


# A bare ZeroMQ pair


def bare_server(address_dir: str, journal: bool, stop: Event) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    server.write_address(server.Path(address_dir), f"tcp://127.0.0.1:{port}")
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
    dealer.connect(address)

    def take() -> int:
        dealer.send(b"take")
        frames = dealer.recv_multipart(copy=False)
        return sum(wire.unpack_group(frames[i : i + 2]).nbytes for i in range(0, len(frames), 2))

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


# Measuring


def measure(kind: str, producers: int, kilobytes: int, seconds: float) -> dict[str, float]:
    """One cell: groups/s, MB/s, latencies in ms, CPU of the middle process per group."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-bench-"))
        stop, end = SPAWN.Event(), SPAWN.Event()
        stack.callback(end.set)
        target, pid, produce, consume = _start(kind, folder, end, stack)
        results = SPAWN.SimpleQueue()
        processes = min(producers, MAX_PROCESSES)
        workers = []
        for i in range(processes):
            sockets = producers // processes + (i < producers % processes)
            arguments = (target, i, sockets, kilobytes, stop, results)
            workers.append(SPAWN.Process(target=produce, args=arguments, daemon=True))
            workers[-1].start()
        take = consume(target, kind == "journal")
        figures = _run(take, pid, [w.pid for w in workers], seconds)
        stop.set()
        latencies = _drain(results, workers, take)
        if latencies:
            p50, p99 = np.percentile(latencies, [50, 99])
            figures |= {"insert_p50_ms": 1e3 * p50, "insert_p99_ms": 1e3 * p99}
        return figures


def _start(kind: str, folder: str, end: Event, stack: contextlib.ExitStack) -> tuple[Any, int | None, Any, Any]:
    if kind == "queue":
        queue = SPAWN.Queue(15 * BATCH)
        return queue, None, queue_producer, lambda q, _: lambda: sum(q.get().nbytes for _ in range(BATCH))
    if kind.startswith("redis"):
        port, pid = stack.enter_context(redis_server(folder, kind == "redis-aof"))
        return port, pid, redis_producer, redis_consumer
    serve = bare_server if kind == "bare" else replay_server
    process = SPAWN.Process(target=serve, args=(folder, kind == "journal", end), daemon=True)
    process.start()
    stack.callback(lambda: (end.set(), process.join(20)))
    address = server.read_address(server.Path(folder), timeout_s=60)
    pair = (bare_producer, bare_consumer) if kind == "bare" else (replay_producer, replay_consumer)
    return address, process.pid, *pair


def _cpu(pids: list[int | None]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids if pid)


def _run(take: Callable[[], int], pid: int | None, producers: list[int], seconds: float) -> dict[str, float]:
    for _ in range(3):
        take()
    settle = time.perf_counter() + seconds / 4
    while time.perf_counter() < settle:
        take()
    everybody = [pid, *producers, os.getpid()]
    middle, all_ = _cpu([pid]), _cpu(everybody)
    start, total, times = time.perf_counter(), 0, []
    while time.perf_counter() < start + seconds or len(times) < 3:
        begin = time.perf_counter()
        total += take()
        times.append(time.perf_counter() - begin)
    elapsed, groups = time.perf_counter() - start, BATCH * len(times)
    return {
        "groups_per_s": groups / elapsed,
        "mb_per_s": total / elapsed / 1e6,
        "take_p50_ms": 1e3 * float(np.percentile(times, 50)),
        "take_p99_ms": 1e3 * float(np.percentile(times, 99)),
        "server_us_per_group": 1e6 * (_cpu([pid]) - middle) / groups,
        "cpu_us_per_group": 1e6 * (_cpu(everybody) - all_) / groups,
    }


def _drain(results: Any, workers: list[Any], take: Callable[[], int]) -> list[float]:
    """Collect latencies while going on to take, so that no producer is stuck behind a full buffer."""
    done = threading.Event()

    def go_on() -> None:
        with contextlib.suppress(Exception):
            while not done.is_set():
                take()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    latencies: list[float] = []
    deadline = time.monotonic() + 20
    for worker in workers:
        while results.empty() and time.monotonic() < deadline and any(w.is_alive() for w in workers):
            time.sleep(0.02)
        if not results.empty():
            latencies += results.get()
        worker.join(0.1)
    done.set()
    for worker in workers:
        worker.join(2)
        if worker.is_alive():
            worker.kill()
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small cell of each, to see that it works")
    parser.add_argument("--producers", default="1,8,64")
    parser.add_argument("--sizes", default="16,256,4096", help="KB per group")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="replay,journal,bare,queue,redis,redis-aof")
    args = parser.parse_args()
    if args.smoke:
        args.producers, args.sizes, args.seconds, args.only = "2", "64", 0.5, "replay,journal,bare"
    kinds = [k for k in args.only.split(",") if not k.startswith("redis") or shutil.which("redis-server")]
    print(
        f"{'producers':>9} {'KB':>5} {'through':>10} {'groups/s':>9} {'MB/s':>7} {'insert p50/p99 ms':>18} "
        f"{'take p50/p99 ms':>16} {'server us':>9} {'all us':>7}"
    )
    rows = []
    for producers in map(int, args.producers.split(",")):
        for kilobytes in map(int, args.sizes.split(",")):
            for kind in kinds:
                row = {"producers": producers, "kb": kilobytes, "through": kind}
                row |= measure(kind, producers, kilobytes, args.seconds)
                rows.append(row)
                print(_line(row), flush=True)
    print(json.dumps({"benchmark": "replay", "cpus": os.cpu_count(), "rows": rows}))


def _line(row: dict[str, Any]) -> str:
    insert = f"{row.get('insert_p50_ms', 0):.1f} / {row.get('insert_p99_ms', 0):.1f}"
    take = f"{row['take_p50_ms']:.1f} / {row['take_p99_ms']:.1f}"
    return (
        f"{row['producers']:>9} {row['kb']:>5} {row['through']:>10} {row['groups_per_s']:>9.0f} {row['mb_per_s']:>7.0f} "
        f"{insert:>18} {take:>16} {row['server_us_per_group']:>9.0f} {row['cpu_us_per_group']:>7.0f}"
    )


if __name__ == "__main__":
    main()
