"""What the replay server costs: the same groups through it, through a bare ZeroMQ pair, a pickling queue, and Redis.

    python benchmarks/replay.py [--smoke] [--producers 1,8,64] [--sizes 16,256,4096] [--seconds 4] [--repeats 5]
                                [--only replay,bare]

Producers pack groups of 8 episodes and send them, at most WINDOW unanswered each; one consumer takes batches of 32
groups and unpacks them. Rows:

    replay     the real server, its clients, leases, admission and ledger; no journal
    journal    the same with the journal on disk; the consumer lets it forget as a trainer with checkpoints would
    sockets    as replay, but no group in a file: as between hosts
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
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from transports import (
    BATCH,
    SPAWN,
    bare_consumer,
    bare_producer,
    bare_server,
    queue_producer,
    redis_consumer,
    redis_producer,
    redis_server,
    replay_consumer,
    replay_producer,
    replay_server,
)

from asyncrl.replay.server import read_address

MAX_PROCESSES = 8
"""More producers than this share processes, each with a socket of its own."""

WARM_BYTES, WARM_S = 800e6, 4.0
"""Before the clock starts: so much has passed, or so long. Segment files are written over by then, as in a long run."""


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
    process = SPAWN.Process(target=serve, args=(folder, kind, end), daemon=True)
    process.start()
    stack.callback(lambda: (end.set(), process.join(20)))
    address = read_address(Path(folder), timeout_s=60)
    pair = (bare_producer, bare_consumer) if kind == "bare" else (replay_producer, replay_consumer)
    return address, process.pid, *pair


def _cpu(pids: list[int | None]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids if pid)


def _run(take: Callable[[], int], pid: int | None, producers: list[int], seconds: float) -> dict[str, float]:
    start, total = time.perf_counter(), 0
    while total < WARM_BYTES and time.perf_counter() < start + min(WARM_S, 2 * seconds):
        total += take()
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
    thread.join(1)  # libzmq aborts a process that is just reading the frames of a message when its sender goes
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
    parser.add_argument("--repeats", type=int, default=1, help="of each cell, its rows in turn; medians are shown")
    parser.add_argument("--only", default="replay,journal,sockets,bare,queue,redis,redis-aof")
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
            cell = {kind: list[dict[str, float]]() for kind in kinds}
            for _ in range(args.repeats):
                for kind in kinds:
                    cell[kind].append(measure(kind, producers, kilobytes, args.seconds))
            for kind, repeats in cell.items():
                row = {"producers": producers, "kb": kilobytes, "through": kind, "repeats": repeats}
                row |= {name: median(r[name] for r in repeats) for name in repeats[0]}
                rows.append(row)
                print(_line(row), flush=True)
    pairs = {
        "vs_bare": ("replay", "bare"),
        "sockets_vs_bare": ("sockets", "bare"),
        "journal_cost": ("journal", "replay"),
    }
    pairs |= {"vs_redis": ("journal", "redis"), "vs_redis_aof": ("journal", "redis-aof")}
    summary = {name: ratios(rows, *pair) for name, pair in pairs.items()}
    for name, found in [s for s in summary.items() if s[1]]:
        print(f"{name:>16} " + "  ".join(f"{cell}: {speed} ({cpu} by CPU)" for cell, (speed, cpu) in found.items()))
    print(json.dumps({"benchmark": "replay", "cpus": os.cpu_count(), **summary, "rows": rows}))


def ratios(rows: list[dict[str, Any]], one: str, other: str) -> dict[str, list[float]]:
    """ "producers x KB" -> [MB/s of `one` over those of `other`, CPU per group of `other` over that of `one`].

    Medians over the repeats, each of which ran the two one after the other.
    """
    cells = {(r["producers"], r["kb"], r["through"]): r["repeats"] for r in rows}
    found = {}
    for (producers, kilobytes, through), repeats in cells.items():
        bases = cells.get((producers, kilobytes, other))
        if through == one and bases is not None:
            pairs = list(zip(repeats, bases, strict=True))
            speed = median(a["mb_per_s"] / b["mb_per_s"] for a, b in pairs)
            cpu = median(b["cpu_us_per_group"] / a["cpu_us_per_group"] for a, b in pairs)
            found[f"{producers}x{kilobytes}"] = [round(speed, 2), round(cpu, 2)]
    return found


def _line(row: dict[str, Any]) -> str:
    insert = f"{row.get('insert_p50_ms', 0):.1f} / {row.get('insert_p99_ms', 0):.1f}"
    take = f"{row['take_p50_ms']:.1f} / {row['take_p99_ms']:.1f}"
    speed = f"{row['groups_per_s']:>9.0f} {row['mb_per_s']:>7.0f}"
    return (
        f"{row['producers']:>9} {row['kb']:>5} {row['through']:>10} {speed} "
        f"{insert:>18} {take:>16} {row['server_us_per_group']:>9.0f} {row['cpu_us_per_group']:>7.0f}"
    )


if __name__ == "__main__":
    main()
