"""`asyncrl train` with a vLLM generator: the same run as with the local engine, by one key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.metrics import read_rows

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_run_with_a_vllm_generator_trains_on_what_the_trainer_calls_the_same_policy(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {
        "generation.engine": "vllm",
        "generation.max-concurrency": 16,
        "training.steps": 3,
        "training.batch-size": 4,
        "training.warmup-sft-steps": 5,
        "algo.dynamic-sampling": "false",
        "replay.target-lag": 1,
        "services.generator.num-replicas": 1,
        "services.trainer.procs": 1,
        "checkpoint.every": 0,
        "run-dir": run_dir,
    }
    argv = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "asyncrl", "train", "--algo", "dapo", *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in read_rows(run_dir) if row["step"]]
    assert len(rows) == 3
    for row in rows:
        assert row["ledger/balance"] == 0
        assert row["tokens/trained"] > 0
    print({key: value for key, value in rows[0].items() if key.startswith(("mismatch/", "sync/", "staleness/"))})
    assert rows[0]["mismatch/k3"] < 1e-3
