"""Killed with SIGKILL at random points, all processes or any one of them, and resumed: the run trains exactly what an
uninterrupted one trains. Both tests are short forms of benchmarks/resume.py."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import resume
from resume_forked import Forked

from asyncrl.metrics import read_rows

pytestmark = pytest.mark.slow


def test_a_run_killed_twenty_times_in_a_row_trains_what_an_uninterrupted_run_trains(tmp_path: Path) -> None:
    """Every process is real but the launcher; each resume has another number of ranks and generators."""
    trial = resume.Trial(start=Forked, steps=32)
    report = resume.measure(tmp_path, trial, kills=20, seed=1, per_run=20)
    assert report.faults == []
    assert len(report.kills) == 20
    victims = {kill.partition(" at ")[0].split()[0] for kill in report.kills}
    assert victims == {"everybody", "trainer", "replay", "generator"}
    last = read_rows(tmp_path / "killed-0")[-1]
    assert last["dropped/expired"] > 0  # leases were lost, their prompts were not
    assert last["ledger/trained"] == 32 * resume.BATCH


def test_asyncrl_train_is_killed_and_resumed_without_a_prompt_skipped_or_doubled(tmp_path: Path) -> None:
    """Each kill ends the run: its launcher, its server or its trainer."""
    trial, report, run_dir = resume.Trial(start=resume.Launch, steps=10), resume.Report(), tmp_path / "killed"
    resume.killed(run_dir, trial, most=2, rng=random.Random(14), report=report)
    expected = resume.uninterrupted(tmp_path, replace(trial, start=Forked))
    assert resume.check(run_dir, expected, trial) == []
    assert (len(report.kills), report.resumes) == (2, 2)
