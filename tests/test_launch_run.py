"""The real system, every process of it: a run to its end, and each way of dying."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.guard import MARK
from asyncrl.metrics import read_rows

pytestmark = pytest.mark.slow

SMALL = {
    "training.steps": 400,
    "training.batch-size": 4,
    "training.warmup-sft-steps": 2,
    "algo.n-samples": 4,
    "algo.dynamic-sampling": "false",
    "services.generator.num-replicas": 1,
    "services.trainer.procs": 1,
    "checkpoint.every": 0,
}


class Launched:
    """`asyncrl train` as a user starts it, its output collected in a file."""

    def __init__(self, run_dir: Path, argv: list[str], command: str = "train") -> None:
        self.dir, self.out = run_dir, run_dir.with_suffix(".out")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.out, "wb") as out:
            words = [sys.executable, "-m", "asyncrl", command, *argv, "--run-dir", str(run_dir)]
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def until_step(self, step: int, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(row["step"] >= step for row in read_rows(self.dir)):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def until_checkpoint(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not list(self.dir.glob("checkpoints/step-*/COMPLETE")):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def members(self) -> list[psutil.Process]:
        """Every living process that belongs to this run, the launcher excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                if MARK in process.environ() and str(self.dir) in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def process_of(self, role: str, index: int = 0) -> psutil.Process:
        title = f"asyncrl {role} {index} {self.dir}"
        return next(p for p in self.members() if " ".join(p.cmdline()).strip().startswith(title[:60]))


@pytest.fixture
def launched(tmp_path):
    """Start runs; whatever a test does, none of their processes survives it."""
    started: list[Launched] = []

    def start(command: str = "train", **changes: object) -> Launched:
        keys = {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}}
        listed = {k: v if isinstance(v, list) else [str(v)] for k, v in keys.items()}
        argv = [word for key, values in listed.items() for word in (f"--{key}", *values)]
        started.append(Launched(tmp_path / "run", argv, command))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()
        for process in run.members():
            process.kill()


def nobody_left(run: Launched, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not run.members()


def balances(run: Launched) -> set[float]:
    return {row["ledger/balance"] for row in read_rows(run.dir) if row["step"]}


def test_a_generator_killed_with_9_is_replaced_and_the_run_finishes(launched):
    run = launched(**{"training__steps": 12, "services__generator__num-replicas": 2, "services__trainer__procs": 2})
    run.until_step(2)
    run.process_of("generator", 1).kill()
    assert run.wait(150) == 0, run.text
    assert "generator 1 ended (killed by SIGKILL): starting it again" in run.text
    rows = read_rows(run.dir)
    assert [row["step"] for row in rows if row["step"]] == list(range(1, 13))
    assert balances(run) == {0}
    assert max(row["staleness/max"] for row in rows if row["step"]) <= 4
    for name in (
        "model/config.json",
        "plots/overview.png",
        "trace.json",
        "samples.jsonl",
        "status.json",
        "config.yaml",
    ):
        assert (run.dir / name).exists(), name
    assert re.search(rf"^run folder  {run.dir}$", run.text, re.M)
    assert nobody_left(run)


@pytest.mark.parametrize("role", ["trainer", "replay"])
def test_a_trainer_or_server_killed_with_9_ends_the_run_within_ten_seconds(launched, role):
    run = launched(checkpoint__every=1)
    run.until_checkpoint()
    run.process_of(role).kill()
    start = time.monotonic()
    assert run.wait(30) == 1
    assert f"`asyncrl train --resume {run.dir}` continues it" in run.text
    assert time.monotonic() - start < 10
    assert f"{role} 0 ended with killed by SIGKILL" in run.text
    assert nobody_left(run)


def test_ctrl_c_ends_with_a_checkpoint_and_the_run_can_be_continued(launched):
    run = launched()
    run.until_step(2)
    second = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", "--resume", str(run.dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert "a run is going on" in second.stderr
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text
    assert list((run.dir / "checkpoints").glob("step-*")), run.text
    assert f"--resume {run.dir}" in run.text
    assert nobody_left(run)
    done = read_rows(run.dir)[-1]["step"]
    again = Launched(run.dir, ["--resume", str(run.dir), "--training.steps", str(done + 2)])
    assert again.wait(90) == 0, again.text
    assert [row["step"] for row in read_rows(run.dir) if row["step"]] == list(range(1, done + 3))
    assert balances(run) == {0}


def test_killing_the_launcher_with_9_leaves_nobody(launched):
    run = launched()
    run.until_step(1)
    run.process.kill()
    run.process.wait()
    assert nobody_left(run)


def test_a_childs_traceback_reaches_the_terminal(launched, tmp_path):
    module = tmp_path / "broken.py"
    module.write_text(
        "import os\n"
        "from asyncrl import register_env\n"
        "from asyncrl.envs.sort_digits import SortDigits\n"
        "if 'ASYNCRL_LAUNCHER' in os.environ:\n"
        "    raise ZeroDivisionError('only in a child')\n"
        "@register_env('broken')\n"
        "class Broken(SortDigits):\n"
        "    pass\n"
    )
    run = launched(**{"import": module, "env": "broken"})
    assert run.wait(60) == 1
    assert "ZeroDivisionError: only in a child" in run.text
    assert 'File "' in run.text
    assert nobody_left(run)


def test_a_run_that_never_moved_its_model_says_so_and_fails(launched, tmp_path):
    module = tmp_path / "lost.py"
    module.write_text(
        "from asyncrl import register_algo\n"
        "from asyncrl.algos.dapo import DAPO\n"
        "@register_algo('lost')\n"
        "class Lost(DAPO):\n"
        "    def surrogate(self, tokens):\n"
        "        return tokens.logprobs_T * float('nan'), {}\n"
    )
    run = launched(**{"import": module, "algo": "lost", "training__steps": 2})
    assert run.wait(120) == 1, run.text
    assert "no step changed the model" in run.text
    assert [row["optimizer/skipped"] for row in read_rows(run.dir) if row["step"]] == [1.0, 1.0]
    assert nobody_left(run)


def test_supervised_training_is_a_run_of_ranks_alone(launched):
    run = launched(command="sft", training__steps=4)
    assert run.wait(90) == 0, run.text
    losses = [row["sft/loss"] for row in read_rows(run.dir)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (run.dir / "model" / "config.json").exists()
    assert not (run.dir / "address.json").exists()
    assert nobody_left(run)


def test_supervised_training_that_is_stopped_promises_no_resume(launched):
    run = launched(command="sft")
    run.until_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text
    assert "supervised training keeps no checkpoint" in run.text
    assert "--resume" not in run.text
    assert nobody_left(run)
