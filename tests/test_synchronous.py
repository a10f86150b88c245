"""`target_lag 0` is synchronous RL: the whole engine gives the losses of a plain loop, bit for bit."""

import subprocess
import sys

import pytest
from sync_reference import train_synchronously
from training_helpers import lone_rank

from asyncrl.metrics import read_rows
from asyncrl.settings import load, resolve

KEYS = {
    "training.steps": 3, "training.batch_size": 6, "training.warmup_sft_steps": 25, "env.digits": 2, "seed": 3,
    "algo.dynamic_sampling": True, "replay.target_lag": 0, "checkpoint.every": 0,
    "services.generator.num_replicas": 1, "services.trainer.procs": 1,
}  # fmt: skip


@pytest.mark.slow
def test_target_lag_0_equals_a_synchronous_loop_bit_for_bit(tmp_path):
    expected = train_synchronously(resolve(load(None, KEYS | {"run_dir": str(tmp_path / "plain")})), lone_rank())
    words = [word for key, value in KEYS.items() for word in (f"--{key}", str(value))]
    run = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", "--run-dir", str(tmp_path / "run"), *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [row for row in read_rows(tmp_path / "run") if row["step"]]
    assert len(rows) == len(expected) == 3
    for row, plain in zip(rows, expected, strict=True):
        assert row["staleness/max"] == 0
        for name in ("loss", "policy/grad_norm", "policy/entropy", "mismatch/k3", "ratio/max"):
            assert row[name] == plain[name], name  # not approximately
    assert sum(row.get("dropped/filtered", 0) for row in rows) > 0, "dynamic sampling should have acted"
