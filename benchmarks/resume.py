"""Exact resume: a run is killed with SIGKILL at random points and resumed until it is done; it must train exactly what
an uninterrupted run trains.

    python benchmarks/resume.py --kills 20

Each kill hits the whole run (launcher first or last), or one of its processes; each resume has another number of ranks
and generators. Prints a line per kill, then one line of JSON; exits with 1 when a prompt was skipped or doubled, a
bound was exceeded or a ledger did not close. Also used by tests/test_chaos_resume.py, in a short form.
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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from asyncrl.guard import MARK
from asyncrl.metrics import read_rows

BATCH = 4
MAX_LAG = 4
VICTIMS = ("everybody", "launcher", "trainer 0", "trainer -1", "replay 0", "generator 0")
LAUNCH_S = 240.0
"""Bound of every wait for a run; a start takes seconds on an idle machine."""


def settings(steps: int, *, ranks: int, generators: int) -> list[str]:
    """The command line of a run of seconds: a tiny model, no warm-up, nothing filtered."""
    keys = {
        "training.steps": steps,
        "training.batch-size": BATCH,
        "training.warmup-sft-steps": 0,
        "algo.n-samples": 2,
        "algo.dynamic-sampling": "false",
        "generation.max-tokens": 6,
        "replay.target-lag": 2,
        "replay.max-lag": MAX_LAG,
        "services.generator.num-replicas": generators,
        "services.trainer.procs": ranks,
        "supervise.max-restarts": 100,
        "checkpoint.every": 2,
        "checkpoint.export": "false",
        "metrics.trace": "false",
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


class Launch:
    """One `asyncrl train` in its own session, its output appended to RUN.out."""

    def __init__(self, run_dir: Path, argv: list[str], *, again: bool) -> None:
        self.dir, self.out = run_dir, run_dir.with_suffix(".out")
        place = ["--resume" if again else "--run-dir", str(run_dir)]
        with open(self.out, "ab") as out:
            words = [sys.executable, "-m", "asyncrl", "train", *place, *argv]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)
        self.began_at = last_step(run_dir)

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

    def until_step(self, step: int) -> bool:
        """Wait until `step` was trained; False when the run ended first. Raises TimeoutError."""
        deadline = time.monotonic() + LAUNCH_S
        while last_step(self.dir) < step:
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not trained within {LAUNCH_S} s:\n{self.text()}")
            time.sleep(0.01)
        return True

    def kill(self, victim: str) -> str:
        """SIGKILL to the victim; returns who it was in the end."""
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

    def wait(self) -> int:
        """The exit code, once nobody is left. Raises TimeoutExpired."""
        code = self.process.wait(LAUNCH_S)
        deadline = time.monotonic() + 30
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        return code

    def end(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        for process in self.members().values():
            process.kill()

    def text(self) -> str:
        return self.out.read_text(errors="replace")[-6000:]


@dataclass
class Report:
    """What a run that was killed again and again amounts to."""

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


def trained(run_dir: Path) -> Counter[int]:
    """Prompt id -> how often it was trained on."""
    return Counter(p for row in read_rows(run_dir, "trained.jsonl") for p in row["prompts"])


def check(run_dir: Path, expected: Counter[int], steps: int) -> list[str]:
    """What is wrong with a finished run; nothing if it equals an uninterrupted one."""
    rows = [row for row in read_rows(run_dir) if row["step"]]
    found = trained(run_dir)
    faults = [f"prompt {p} trained {found[p]} times, expected {expected[p]}" for p in found | expected
              if found[p] != expected[p]]  # fmt: skip
    for name, listed in (("metrics", rows), ("trained", read_rows(run_dir, "trained.jsonl"))):
        if [row["step"] for row in listed] != list(range(1, steps + 1)):
            faults.append(f"{name}.jsonl has steps {[row['step'] for row in listed]}")
    faults += [f"step {r['step']}: the ledger is off by {r['ledger/balance']}" for r in rows if r["ledger/balance"]]
    faults += [f"step {r['step']}: lag {r['staleness/max']}" for r in rows if r["staleness/max"] > MAX_LAG]
    return faults


def uninterrupted(folder: Path, steps: int) -> Counter[int]:
    """What a run trains that nobody disturbs. Raises RuntimeError when it fails."""
    launch = Launch(folder / "whole", settings(steps, ranks=1, generators=1), again=False)
    try:
        if launch.wait() != 0:
            raise RuntimeError(f"the uninterrupted run failed:\n{launch.text()}")
    finally:
        launch.end()
    return trained(folder / "whole")


def killed(run_dir: Path, *, steps: int, most: int, rng: random.Random, report: Report) -> None:
    """One run, killed until `most` kills are done or it has ended by itself, and resumed to its end."""
    launch = Launch(run_dir, settings(steps, ranks=1, generators=1), again=False)
    left, victims = most, rng.sample(VICTIMS, len(VICTIMS))
    try:
        while True:
            ahead = rng.choice([0, 1, 2, 3, 5])
            if left and launch.until_step(min(steps - 1, launch.began_at + ahead)):
                time.sleep(rng.random() * (0.2 if ahead else 10.0))  # with 0: while it starts
                victim = launch.kill(victims[left % len(victims)])
                left -= 1
                report.kills.append(f"{victim} at step {last_step(run_dir)}")
                print(f"{run_dir.name}: killed {report.kills[-1]}", flush=True)
                if victim.startswith("generator"):
                    continue
            code = launch.wait()
            if code == 0:
                return
            if left == most or (code != 1 and code != -signal.SIGKILL):
                raise RuntimeError(f"the run failed with code {code}:\n{launch.text()}")
            shape = {"ranks": rng.choice([1, 1, 2]), "generators": rng.choice([1, 1, 2])}
            launch = Launch(run_dir, settings(steps, **shape), again=True)
            report.resumes += 1
            if not left and report.resumes > most + 1:
                raise RuntimeError(f"the run does not get to its end:\n{launch.text()}")
    finally:
        launch.end()


def measure(folder: Path, *, kills: int, steps: int, seed: int, per_run: int) -> Report:
    """`kills` kills over as many runs as that takes."""
    report, rng = Report(), random.Random(seed)
    expected = uninterrupted(folder, steps)
    while len(report.kills) < kills:
        run_dir = folder / f"killed-{report.runs}"
        killed(run_dir, steps=steps, most=min(per_run, kills - len(report.kills)), rng=rng, report=report)
        report.runs += 1
        report.faults += [f"{run_dir.name}: {fault}" for fault in check(run_dir, expected, steps)]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=10, help="kills of one run")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where the runs go; default: a temporary folder")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        report = measure(folder, kills=args.kills, steps=args.steps, seed=args.seed, per_run=args.per_run)
    for fault in report.faults:
        print(fault)
    figures = {"kills": len(report.kills), "runs": report.runs, "resumes": report.resumes, "steps": args.steps}
    figures |= {"killed": report.kills, "faults": report.faults, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(figures))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
