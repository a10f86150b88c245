"""Exact resume: a run is killed with SIGKILL at random points and resumed until it is done; it must train exactly what
an uninterrupted run trains.

    python benchmarks/resume.py --kills 20
    python benchmarks/resume.py --kills 200 --forked

Each kill hits the whole run (launcher first or last), or one of its processes: while it starts, a moment after a step,
or while a checkpoint is written. Each resume has another number of ranks and generators. Prints a line per kill, then
one line of JSON; exits with 1 when a prompt was skipped or doubled, a bound was exceeded or a ledger did not close.
`--forked` spares the imports (resume_forked.py). Used by tests/test_chaos_resume.py, in short forms of both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import psutil
from resume_forked import Forked

from asyncrl.guard import MARK
from asyncrl.metrics import read_rows

BATCH = 4
VICTIMS = ("everybody", "launcher", "trainer 0", "trainer -1", "replay 0", "generator 0")
INSTANTS = ("start", "step", "step", "checkpoint")
LAUNCH_S = 240.0
"""Bound of every wait for a run; a start takes seconds on an idle machine."""


def settings(steps: int, target_lag: int, *, ranks: int, generators: int) -> dict[str, object]:
    """A run of seconds: a tiny model, no warm-up, nothing filtered."""
    return {
        "training.steps": steps,
        "training.batch-size": BATCH,
        "training.warmup-sft-steps": 0,
        "algo.n-samples": 2,
        "algo.dynamic-sampling": "false",
        "generation.max-tokens": 6,
        "replay.target-lag": target_lag,
        "replay.max-lag": target_lag + 1,  # little slack, and several steps are lost: a bound that is loosened shows
        "services.generator.num-replicas": generators,
        "services.trainer.procs": ranks,
        "supervise.max-restarts": 100,
        "checkpoint.every": 4,
        "checkpoint.export": "false",
        "metrics.trace": "false",
    }


class Running(Protocol):
    """One launch of a run, fresh or resumed."""

    starting_s: float
    """About how long a start takes: a kill at random strikes within."""

    def poll(self) -> int | None:
        """The exit code, once the run has ended."""

    def kill(self, victim: str) -> str:
        """SIGKILL to the victim; returns who it was in the end."""

    def end(self) -> None:
        """Leave nothing behind."""

    def text(self) -> str:
        """What it said, for an error's message."""


class Launch:
    """One `asyncrl train` in its own session, its output appended to RUN.out."""

    starting_s = 10.0

    def __init__(self, run_dir: Path, keys: dict[str, object], *, again: bool) -> None:
        self.dir, self.out = run_dir, run_dir.with_suffix(".out")
        place = ["--resume" if again else "--run-dir", str(run_dir)]
        argv = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        with open(self.out, "ab") as out:
            words = [sys.executable, "-m", "asyncrl", "train", *place, *argv]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)

    def poll(self) -> int | None:
        """Once the launcher has ended, waits for the rest to follow, which the guard sees to."""
        code = self.process.poll()
        deadline = time.monotonic() + 30
        while code is not None and self.members():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{sorted(self.members())} outlived the launcher:\n{self.text()}")
            time.sleep(0.05)
        return code

    def members(self) -> dict[str, psutil.Process]:
        """The roles that live now, by "role index"; children of roles (reward workers) under their process id."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline()).split()
                if MARK in process.environ() and str(self.dir) in words:
                    found[role_of(words) or str(process.pid)] = process
            except psutil.Error:
                continue
        return found

    def kill(self, victim: str) -> str:
        members = self.members()
        if victim == "trainer -1":
            victim = max((name for name in members if name.startswith("trainer")), default="everybody")
        if victim in members:
            members[victim].kill()
            return victim
        self.process.kill()
        for process in members.values() if victim != "launcher" else ():
            process.kill()
        return "launcher" if victim == "launcher" else "everybody"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.members().values():
            process.kill()

    def text(self) -> str:
        return self.out.read_text(errors="replace")[-6000:]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is run, and how it is started."""

    start: Callable[..., Running]
    """(run_dir, keys, again=) -> a launch: Launch or Forked."""
    steps: int
    target_lag: int = 1

    def launch(self, run_dir: Path, *, ranks: int = 1, generators: int = 1) -> Running:
        """The run in that folder: from its beginning, or resumed if there is one."""
        keys = settings(self.steps, self.target_lag, ranks=ranks, generators=generators)
        return self.start(run_dir, keys, again=(run_dir / "config.yaml").exists())


@dataclass
class Report:
    """What runs that were killed again and again amount to."""

    kills: list[str] = field(default_factory=list)
    runs: int = 0
    resumes: int = 0
    faults: list[str] = field(default_factory=list)


def role_of(words: list[str]) -> str:
    """ "trainer 0" of a role's command line, before and after it has named itself; empty for anything else."""
    if words[0] == "asyncrl":
        return " ".join(words[1:3])
    options = dict(pairwise(words))
    return f"{options['--role']} {options.get('--index', 0)}" if "--role" in options else ""


def last_step(run_dir: Path) -> int:
    rows = read_rows(run_dir, "trained.jsonl")
    return rows[-1]["step"] if rows else 0


def parts(run_dir: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, and those that never were finished."""
    found = set()
    for path in (run_dir / "checkpoints").glob(".step-*.part"):
        with suppress(FileNotFoundError):  # finished meanwhile
            found.add((path.name, path.stat().st_ino))
    return found


def trained(run_dir: Path) -> Counter[int]:
    """Prompt id -> how often it was trained on."""
    return Counter(p for row in read_rows(run_dir, "trained.jsonl") for p in row["prompts"])


def check(run_dir: Path, expected: Counter[int], trial: Trial) -> list[str]:
    """What is wrong with a finished run; nothing if it equals an uninterrupted one."""
    most = trial.target_lag + 1
    rows = [row for row in read_rows(run_dir) if row["step"]]
    found = trained(run_dir)
    faults = [f"prompt {p} trained {found[p]} times, expected {expected[p]}" for p in found | expected
              if found[p] != expected[p]]  # fmt: skip
    for name, listed in (("metrics", rows), ("trained", read_rows(run_dir, "trained.jsonl"))):
        if [row["step"] for row in listed] != list(range(1, trial.steps + 1)):
            faults.append(f"{name}.jsonl has steps {[row['step'] for row in listed]}")
    faults += [f"step {r['step']}: the ledger is off by {r['ledger/balance']}" for r in rows if r["ledger/balance"]]
    faults += [f"step {r['step']}: lag {r['staleness/max']}" for r in rows if r["staleness/max"] > most]
    return faults


def until(launch: Running, condition: Callable[[], bool]) -> bool:
    """Wait for the condition; False when the run ended first. Raises TimeoutError."""
    deadline = time.monotonic() + LAUNCH_S
    while not condition():
        if launch.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came of the run within {LAUNCH_S} s:\n{launch.text()}")
        time.sleep(0.01)
    return True


def ended(launch: Running) -> int:
    """The exit code of the run, which must end."""
    until(launch, lambda: False)
    code = launch.poll()
    assert code is not None
    return code


def instant(launch: Running, run_dir: Path, *, steps: int, rng: random.Random) -> bool:
    """Wait for a random instant to kill at; False when the run ended first."""
    kind, ahead = rng.choice(INSTANTS), rng.randint(1, 4)
    began_at, old_parts = last_step(run_dir), parts(run_dir)
    if kind == "start":
        deadline = time.monotonic() + rng.random() * launch.starting_s
        return until(launch, lambda: time.monotonic() > deadline)
    if not until(launch, lambda: last_step(run_dir) >= min(steps - 1, began_at + ahead)):
        return False
    if kind == "checkpoint":
        return until(launch, lambda: bool(parts(run_dir) - old_parts))
    time.sleep(rng.random() * 0.2)
    return True


def uninterrupted(folder: Path, trial: Trial) -> Counter[int]:
    """What a run trains that nobody disturbs. Raises RuntimeError when it fails."""
    launch = trial.launch(folder / "whole")
    try:
        if ended(launch) != 0:
            raise RuntimeError(f"the uninterrupted run failed:\n{launch.text()}")
    finally:
        launch.end()
    return trained(folder / "whole")


def killed(run_dir: Path, trial: Trial, *, most: int, rng: random.Random, report: Report) -> None:
    """One run, killed until `most` kills are done or it has ended by itself, and resumed to its end."""
    launch = trial.launch(run_dir)
    left, victims = most, rng.sample(VICTIMS, len(VICTIMS))
    try:
        while True:
            struck = ""
            if left and instant(launch, run_dir, steps=trial.steps, rng=rng):
                struck, left = launch.kill(victims[left % len(victims)]), left - 1
                report.kills.append(f"{struck} at step {last_step(run_dir)}")
                print(f"{run_dir.name}: killed {report.kills[-1]}", flush=True)
                if struck.startswith("generator"):
                    continue
            code = ended(launch)
            if code == 0:
                return
            if not struck or code not in (1, -signal.SIGKILL):
                raise RuntimeError(f"the run failed by itself with code {code}:\n{launch.text()}")
            launch.end()
            launch = trial.launch(run_dir, ranks=rng.choice([1, 1, 2]), generators=rng.choice([1, 1, 2]))
            report.resumes += 1
    finally:
        launch.end()


def measure(folder: Path, trial: Trial, *, kills: int, seed: int, per_run: int) -> Report:
    """`kills` kills over as many runs as that takes."""
    report, rng = Report(), random.Random(seed)
    expected = uninterrupted(folder, trial)
    while len(report.kills) < kills:
        run_dir, most = folder / f"killed-{report.runs}", min(per_run, kills - len(report.kills))
        killed(run_dir, trial, most=most, rng=rng, report=report)
        report.runs += 1
        report.faults += [f"{run_dir.name}: {fault}" for fault in check(run_dir, expected, trial)]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=20, help="kills of one run")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--target-lag", type=int, default=1, help="the bound, replay.max-lag, is one more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forked", action="store_true", help="fork the processes from one that has imported torch")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs go; default: a temporary folder")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trial = Trial(start=Forked if args.forked else Launch, steps=args.steps, target_lag=args.target_lag)
        report = measure(folder, trial, kills=args.kills, seed=args.seed, per_run=args.per_run)
    for fault in report.faults:
        print(fault)
    figures = {"kills": len(report.kills), "runs": report.runs, "resumes": report.resumes, "steps": args.steps}
    figures |= {"killed": report.kills, "faults": report.faults, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(figures))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
