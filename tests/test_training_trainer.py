"""The trainer's process against a real replay server and a generator of random groups: figures, saves, its end."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from training_helpers import free_port, random_groups

from asyncrl.models import build_model
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.server import serve
from asyncrl.roles import read_address
from asyncrl.settings import load, resolve, save

pytestmark = pytest.mark.slow
OVERRIDES = {
    "training.steps": 3, "training.batch_size": 4, "algo.n_samples": 2, "training.warmup_sft_steps": 2,
    "checkpoint.every": 2, "replay.target_lag": 1, "supervise.stall_limit_s": 120, "metrics.trackers": ["jsonl"],
}  # fmt: skip


@contextlib.contextmanager
def world(folder, *, generate=True, **overrides):
    """A run folder, a replay server and (when asked) a generator, until the block ends."""
    run = resolve(
        load(None, OVERRIDES | {"run_dir": str(folder)} | {k.replace("__", "."): v for k, v in overrides.items()})
    )
    save(run)
    stop = threading.Event()
    threads = [threading.Thread(target=serve, args=(run, stop))]
    threads[0].start()
    try:
        address = read_address(run.dir, timeout_s=10)
        if generate:
            threads.append(threading.Thread(target=lambda: asyncio.run(generator(address, run.algo.n_samples))))
            threads[1].start()
        yield run, address
    finally:
        stop.set()
        for thread in reversed(threads):
            thread.join(timeout=20)
            assert not thread.is_alive()


async def generator(address, size):
    """Random tokens of the version of each lease, until the run is finished."""
    client = AsyncReplayClient(address)
    await client.hello()
    await client.lookup("weights", 240)  # as a real one: nothing is leased before this trainer is there
    while leases := await client.lease(4):
        for lease in leases:
            (group,) = random_groups(1, size, seed=lease.id, version=lease.version)
            group.lease_id, group.prompt = lease.id, lease.prompt
            await client.insert(group)
    client.close()


def start(run, address, num_ranks=1):
    port = free_port()
    command = [sys.executable, "-m", "asyncrl", "train", "--role", "trainer", "--run-dir", str(run.dir)]
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [*command, "--address", address],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def finish(processes, timeout_s=240):
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)


def rows_of(run):
    return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_warm_up_to_export_and_its_resume_on_another_number_of_ranks(tmp_path):
    with world(tmp_path) as (run, address):
        codes, output = finish(start(run, address, num_ranks=2))
    assert codes == [0, 0], output
    warm_up, *rows = rows_of(run)
    assert warm_up["sft/steps"] == 2
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["ledger/balance"] == 0
        assert 0 <= row["idle/trainer"] <= 1
        assert row["staleness/max"] <= run.config.replay.max_lag
        assert {"reward/mean", "loss", "policy/entropy", "ratio/ess", "time/train_s", "length/truncated"} <= set(row)
    assert [p.name for p in sorted((run.dir / "checkpoints").glob("step-*"))] == ["step-000002", "step-000003"]
    assert build_model(str(run.dir / "model"), dtype=torch.float32).config.model_type == "qwen3"
    assert (run.dir / "samples.jsonl").read_text().count("\n") == 3 * run.config.metrics.samples_per_step
    with world(tmp_path, training__steps=5) as (run, address):
        codes, output = finish(start(run, address))
    assert codes == [0], output
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["ledger/balance"] == 0 for row in rows[1:])


def test_a_signal_while_it_waits_ends_it_with_a_checkpoint(tmp_path):
    with world(tmp_path, generate=False) as (run, address):
        processes = start(run, address)
        deadline = time.monotonic() + 200
        while not (run.dir / "metrics.jsonl").exists() or not rows_of(run):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes[0].send_signal(signal.SIGTERM)
        codes, output = finish(processes, timeout_s=120)
    assert codes == [0], output
    assert (run.dir / "checkpoints" / "step-000000" / "COMPLETE").exists()
    assert not (run.dir / "model").exists()


def test_a_signal_to_the_server_and_the_trainer_at_once_ends_it_with_a_checkpoint(tmp_path):
    """As a scheduler ends a job: everybody is told, and killed half a minute later."""
    with world(tmp_path, generate=False) as (run, _):
        pass
    role = [sys.executable, "-m", "asyncrl", "train", "--role", "replay", "--run-dir", str(run.dir)]
    (run.dir / "address.json").unlink()
    server = subprocess.Popen(role)
    try:
        processes = start(run, read_address(run.dir, timeout_s=60))
        deadline = time.monotonic() + 200
        while not (run.dir / "metrics.jsonl").exists() or not rows_of(run):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        processes[0].send_signal(signal.SIGTERM)
        codes, output = finish(processes, timeout_s=30)
    finally:
        server.kill()
    assert codes == [0], output
    assert "this run ends without it" in output
    assert (run.dir / "checkpoints" / "step-000000" / "COMPLETE").exists()


def test_a_wait_without_generators_ends_in_its_diagnosis(tmp_path):
    with world(tmp_path, generate=False, supervise__stall_limit_s=3, supervise__stall_s=1) as (run, address):
        codes, output = finish(start(run, address))
    assert codes == [1]
    assert "asyncrl.training.director trainer has waited" in output  # before the end, too
    error = json.loads((run.dir / "errors" / "trainer-0.json").read_text())
    assert "TakeTimeout" in error["traceback"]
    assert "no generator" in error["traceback"]


def test_the_end_of_the_data_is_the_end_of_the_run(tmp_path):
    """Ten prompts make two batches of four; two are left over."""
    module = tmp_path / "ten_prompts.py"
    module.write_text(TEN_PROMPTS)
    keys = {"imports": [str(module)], "env__name": "ten_prompts", "training__warmup_sft_steps": 0, "training__steps": 9}
    keys["training__lora__rank"] = 2
    with world(tmp_path / "run", **keys) as (run, address):
        codes, output = finish(start(run, address))
    assert codes == [0], output
    assert [row["step"] for row in rows_of(run)] == [1, 2]
    assert (run.dir / "checkpoints" / "step-000002" / "COMPLETE").exists()
    assert (run.dir / "model" / "config.json").exists()
    assert (run.dir / "adapter" / "adapter_config.json").exists()


def test_the_epoch_is_how_far_the_data_was_trained_on_also_after_a_resume(tmp_path):
    """Ten rows, four groups a step: the furthest prompt of all steps so far, over ten."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    keys = {"env__name": "dataset", "dataset__path": str(data), "training__warmup_sft_steps": 0}
    for steps in (4, 7):
        with world(tmp_path / "run", **keys, training__steps=steps) as (run, address):
            codes, output = finish(start(run, address))
        assert codes == [0], output
    lines = (run.dir / "trained.jsonl").read_text().splitlines()
    furthest = np.maximum.accumulate([max(json.loads(line)["prompts"]) for line in lines])
    assert [row["data/epoch"] for row in rows_of(run)] == pytest.approx((furthest + 1) / 10)
    assert rows_of(run)[-1]["data/epoch"] >= 2.8


TEN_PROMPTS = """
from asyncrl.env import Env
from asyncrl.registry import register_env
from asyncrl.types import Prompt

@register_env("ten_prompts")
class TenPrompts(Env):
    def prompts(self, start=0):
        return (Prompt(id=i, prompt="a") for i in range(start, 10))

    def score(self, text, prompt):
        return 0.0
"""
