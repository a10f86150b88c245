"""A generator as a process of its own, between a real replay server and a real weight sender."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch
from generation_models import full_logprobs
from generation_runs import make_run, serving

from asyncrl.config import WeightsConfig
from asyncrl.models import build_model
from asyncrl.replay.client import ReplayClient
from asyncrl.weights.sender import WeightSender

torch.set_num_threads(1)
pytestmark = pytest.mark.slow


class Trainer:
    """Trains nothing: its version v is the tiny model of seed v."""

    def __init__(self, address: str, run) -> None:
        self.client = ReplayClient(address, role="trainer")
        self.model = build_model("tiny", dtype=torch.float32)
        self.sender = WeightSender(
            tensors=self.model.named_parameters, rank=0, config=WeightsConfig(timeout_s=30), device="cpu"
        )
        self.batch_size = run.config.training.batch_size
        self.client.announce("weights", self.sender.address)

    def publish(self, version: int, receivers: int) -> None:
        """Wait until this many receivers are there, send them the version, and say that it is live."""
        deadline = time.monotonic() + 120
        while self.sender.newcomers() < receivers and version == 0:
            assert time.monotonic() < deadline, "no generator said hello"
            time.sleep(0.05)
        self.model.load_state_dict(model_of(version).state_dict())
        report = self.sender.publish(version)
        assert (report.receivers, report.dropped) == (receivers, ()), report
        self.client.publish(version=version, step=version)

    def take(self, step: int):
        return self.client.take(step=step, num_groups=self.batch_size, version=step - 1, timeout_s=60)

    def close(self) -> None:
        self.client.close()
        self.sender.close()


def model_of(version: int):
    return build_model("tiny", dtype=torch.float32, seed=version)


@contextmanager
def trainer(address: str, run) -> Iterator[Trainer]:
    made = Trainer(address, run)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def generator(run, address: str, index: int = 0) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "asyncrl", "train", "--role", "generator", "--run-dir", str(run.dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--index", str(index), "--address", address], env=environment, stderr=subprocess.PIPE, text=True
    )
    tail = Tail(process)
    try:
        yield process
    except BaseException:
        print(tail.text())
        raise
    finally:
        process.kill()
        process.wait(10)


class Tail:
    """Reads what a process says, so that it never blocks on a full pipe."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self._lines.extend(process.stderr), daemon=True)
        self._thread.start()

    def text(self) -> str:
        return "".join(self._lines[-50:])


def test_a_generator_serves_what_the_trainer_sends_and_ends_with_the_run(tmp_path):
    run = make_run(tmp_path, "good", training__steps=4, replay__target_lag=0)
    with serving(run) as address, trainer(address, run) as train, generator(run, address) as process:
        train.publish(0, receivers=1)
        for step in range(1, 5):
            taken = train.take(step)
            assert taken.metrics["ledger/balance"] == 0
            for episode in (e for g in taken.groups for e in g.episodes):
                assert (episode.versions == step - 1).all()
                expected = full_logprobs(model_of(step - 1), episode.prompt_ids.tolist(), episode.token_ids.tolist())
                torch.testing.assert_close(torch.from_numpy(episode.logprobs), expected, atol=1e-5, rtol=0)
            train.publish(step, receivers=1)
        train.client.finish("done")
        assert process.wait(60) == 0


def test_a_generator_that_comes_after_the_end_of_the_run_ends_too(tmp_path):
    run = make_run(tmp_path, "good", training__steps=4, supervise__start_timeout_s=5)
    with serving(run) as address, trainer(address, run) as train:
        train.client.finish("done")
        with generator(run, address) as process:
            assert process.wait(60) == 0


def test_a_generator_that_comes_before_the_trainer_of_a_resumed_run_waits_for_it(tmp_path):
    run = make_run(tmp_path, "good", training__steps=4)
    with serving(run) as address, trainer(address, run) as former:
        former.client.finish("interrupted")
        with generator(run, address) as process:
            until(lambda: former.sender.newcomers() == 1)  # it knows of a run that is finished
            former.client.rewind(step=0, version=0)
            former.publish(0, receivers=1)
            former.take(1)
            assert process.poll() is None


def test_a_generator_whose_run_ends_before_it_has_weights_ends_too(tmp_path):
    run = make_run(tmp_path, "good", training__steps=4)
    with serving(run) as address, trainer(address, run) as train, generator(run, address) as process:
        until(lambda: train.sender.newcomers() == 1)
        train.client.finish("done")
        assert process.wait(60) == 0


def test_a_generator_that_lives_on_follows_a_trainer_that_starts_again(tmp_path):
    run = make_run(tmp_path, "good", training__steps=4)
    with serving(run) as address, generator(run, address) as process:
        with trainer(address, run) as former:
            former.publish(0, receivers=1)
            former.client.rewind(step=0, version=0)  # which voids its announcement
        with trainer(address, run) as train:  # its sender listens elsewhere
            train.publish(0, receivers=1)
            train.take(1)
            train.publish(1, receivers=1)
            train.client.finish("done")
            assert process.wait(60) == 0


def test_sigterm_ends_a_generator_cleanly_and_frees_its_leases_at_once(tmp_path):
    run = make_run(tmp_path, "slow", training__steps=9)
    with serving(run) as address, trainer(address, run) as train, generator(run, address) as process:
        train.publish(0, receivers=1)
        until(lambda: train.client.status()["ledger"]["ledger/in_flight"] > 0)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        ledger = train.client.status()["ledger"]
        assert ledger["ledger/in_flight"] == 0
        assert not [c for c in children if c.is_running()]


def test_a_generator_that_fails_says_why_and_leaves_an_error_file(tmp_path):
    run = make_run(tmp_path, "good", training__steps=9, generation__device="cuda")
    with serving(run) as address, trainer(address, run), generator(run, address) as process:
        assert process.wait(120) == (1 if not torch.cuda.is_available() else 0)
        assert "torch sees no GPU" in (tmp_path / "errors" / "generator-0.json").read_text()


def test_killed_generators_leave_no_reward_worker_behind_even_while_it_hangs(tmp_path):
    run = make_run(tmp_path, "hang", training__steps=9)
    with serving(run) as address, trainer(address, run) as train, generator(run, address) as process:
        train.publish(0, receivers=1)
        until(lambda: train.client.status()["ledger"]["ledger/in_flight"] > 0)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        until(lambda: any(c.cpu_percent(0.1) > 10 for c in children))
        process.kill()
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert len(gone) == len(children)
        assert not alive


def until(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
