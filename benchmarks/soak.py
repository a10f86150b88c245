"""An hour in the life of the replay server: simulated generators against the real process, far faster than real ones.

    python benchmarks/soak.py [--minutes 60] [--generators 8] [--kilobytes 64] [--seed 0] [--smoke]

Generators come and go (killed without a word, or leaving), answer late, drop groups, send them twice; a trainer takes
batches, publishes and lets the journal forget, as with a checkpoint every 10 steps. Every second the server's memory,
descriptors and threads and the run folder's size are read. At the end: the ledger closes, nothing is older than
max_lag, memory after the first fifth rises by less than --allowed-mb-per-hour (a least-squares slope), and the number
of descriptors is what it was. Prints what it saw, then one line of JSON; exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from asyncrl.config import CheckpointConfig, Config, ReplayConfig, SuperviseConfig, TrainingConfig
from asyncrl.env import Env
from asyncrl.replay import server
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.messages import Lease
from asyncrl.types import Episode, Group, Prompt

BATCH = 16
REASONS = ("filtered", "reward_timeout", "rollout_error", "aborted")
SPAWN = multiprocessing.get_context("spawn")


class Endless(Env):
    """Prompts with some text in them."""

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        while True:
            yield Prompt(id=start, prompt=f"prompt {start} " * 20, target=start)
            start += 1


def serve(run_dir: str, stop: Event) -> None:
    config = Config(
        run_dir=run_dir,
        training=TrainingConfig(batch_size=BATCH, steps=10**9),
        replay=ReplayConfig(target_lag=2),
        supervise=SuperviseConfig(dead_after_s=5.0),
        checkpoint=CheckpointConfig(every=10),
    )
    server.serve(SimpleNamespace(config=config, env=Endless()), stop)


def make_group(lease: Lease, kilobytes: int, rng: random.Random) -> Group:
    """4 episodes of random length, `kilobytes` KB on average."""

    def episode() -> Episode:
        n = rng.randint(1, 2 * kilobytes * 1024 // (13 * 4))
        return Episode(
            prompt_ids=np.arange(64, dtype=np.int32),
            token_ids=np.zeros(n, np.int32),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, lease.version, np.int32),
            loss_mask=np.ones(n, bool),
            reward=rng.random(),
            finish_reason="stop",
            text="x" * n,
        )

    return Group(lease_id=lease.id, prompt=lease.prompt, episodes=[episode() for _ in range(4)])


async def generate(address: str, index: int, kilobytes: int, rng: random.Random, life_s: float) -> None:
    """One generator from hello to a sudden or an orderly end."""
    client = AsyncReplayClient(address, index=index)
    await client.hello()

    async def beat() -> None:
        while True:
            await client.heartbeat({"tokens": time.monotonic(), "busy_s": time.monotonic()})
            await asyncio.sleep(1)

    async def work() -> None:
        while leases := await client.lease(rng.randint(1, 4)):
            for lease in leases:
                await asyncio.sleep(rng.expovariate(1 / 0.005))
                if rng.random() < 0.1:
                    await client.drop(lease.id, rng.choice(REASONS), num_tokens=10, reward=0.0, length=5.0)
                    continue
                group = make_group(lease, kilobytes, rng)
                await client.insert(group)
                if rng.random() < 0.02:
                    await client.insert(group)

    tasks = [asyncio.create_task(coroutine) for coroutine in (beat(), work(), work(), work())]
    await asyncio.sleep(life_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if rng.random() < 0.5:
        with contextlib.suppress(TimeoutError, ValueError):
            await asyncio.wait_for(client.leave(), 5)
    client.close()


def generators(address: str, indices: list[int], kilobytes: int, seed: int) -> None:
    """Several generators in one process; each is followed by another when it ends."""

    async def live(index: int) -> None:
        rng = random.Random(seed * 1000 + index)
        while True:
            await generate(address, index, kilobytes, rng, life_s=rng.expovariate(1 / 10))

    async def main() -> None:
        await asyncio.gather(*(live(index) for index in indices))

    asyncio.run(main())


class Trainer:
    """Takes, publishes, forgets, and looks at what it was given."""

    def __init__(self, address: str) -> None:
        self.client = ReplayClient(address, role="trainer")
        self.client.rewind(step=0, version=0)
        self.client.publish(version=0, step=0)
        self.step, self.max_lag, self.metrics = 0, 0, {}

    def train(self) -> None:
        version, self.step = self.step, self.step + 1
        taken = self.client.take(step=self.step, num_groups=BATCH, version=version, timeout_s=120)
        lags = [version - int(e.versions.min()) for g in taken.groups for e in g.episodes]
        self.max_lag, self.metrics = max(self.max_lag, *lags), taken.metrics
        for account in ("ledger", "ledger_tokens"):
            if taken.metrics[f"{account}/balance"] != 0:
                raise SystemExit(f"step {self.step}: {account} does not close: {taken.metrics}")
        self.client.publish(version=self.step, step=self.step)
        if self.step % 10 == 0:
            self.client.forget(step=self.step - 10)


def watch(pid: int, folder: Path, samples: list[tuple[float, ...]], done: threading.Event) -> None:
    """(seconds, resident MB, descriptors, threads, MB on disk) of the server, every second."""
    process, start = psutil.Process(pid), time.monotonic()
    while not done.wait(1.0):
        disk = 0
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                disk += path.stat().st_size
        memory = process.memory_info().rss / 1e6
        samples.append((time.monotonic() - start, memory, process.num_fds(), process.num_threads(), disk / 1e6))


def soak(minutes: float, num_generators: int, kilobytes: int, seed: int) -> dict[str, Any]:
    """Run it; returns the figures."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder:
        stop, done = SPAWN.Event(), threading.Event()
        process = SPAWN.Process(target=serve, args=(folder, stop))
        process.start()
        address = server.read_address(Path(folder), timeout_s=60)
        trainer = Trainer(address)
        hosts = [
            SPAWN.Process(
                target=generators, args=(address, list(range(i, num_generators, 2)), kilobytes, seed), daemon=True
            )
            for i in range(2)
        ]
        for host in hosts:
            host.start()
        samples: list[tuple[float, ...]] = []
        watcher = threading.Thread(target=watch, args=(process.pid, Path(folder), samples, done))
        watcher.start()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            trainer.train()
        done.set()
        watcher.join()
        for host in hosts:
            host.kill()
        trainer.client.close()
        stop.set()
        process.join(20)
    return figures(np.array(samples), trainer)


def figures(samples: np.ndarray, trainer: Trainer) -> dict[str, Any]:
    settled = samples[len(samples) // 5 :]
    slope = float(np.polyfit(settled[:, 0] / 3600, settled[:, 1], 1)[0])
    fds = settled[:, 2]
    metrics = trainer.metrics
    return {
        "benchmark": "soak",
        "seconds": round(float(samples[-1, 0])),
        "steps": trainer.step,
        "groups": int(metrics["ledger/started"]),
        "dropped": {k.removeprefix("dropped/"): int(v) for k, v in metrics.items() if k.startswith("dropped/")},
        "max_lag": trainer.max_lag,
        "ledger_balance": int(metrics["ledger/balance"]),
        "memory_mb": [round(float(x), 1) for x in (settled[0, 1], settled[:, 1].max(), settled[-1, 1])],
        "memory_slope_mb_per_hour": round(slope, 1),
        "descriptors": [int(fds[0]), int(fds.max()), int(fds[-1])],
        "threads": int(samples[-1, 3]),
        "disk_mb": round(float(settled[:, 4].max()), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--generators", type=int, default=8)
    parser.add_argument("--kilobytes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allowed-mb-per-hour", type=float, default=20.0)
    parser.add_argument("--smoke", action="store_true", help="20 seconds; the slope is printed and not judged")
    args = parser.parse_args()
    minutes = 1 / 3 if args.smoke else args.minutes
    result = soak(minutes, args.generators, args.kilobytes, args.seed)
    for key, value in result.items():
        print(f"{key:>26}  {value}")
    print(json.dumps(result))
    wrong = result["max_lag"] > 4 or result["ledger_balance"] != 0
    wrong |= result["descriptors"][-1] > result["descriptors"][0] + args.generators + 4  # connections that end
    wrong |= not args.smoke and result["memory_slope_mb_per_hour"] > args.allowed_mb_per_hour
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
