"""The script that trains a pretrained model runs, with the tiny model, and prints one line of JSON at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "pretrained.py"


@pytest.mark.slow
def test_the_benchmark_runs_and_its_last_line_is_json(tmp_path):
    small = "--services.trainer.procs 1 --services.generator.num-replicas 1 --training.warmup-sft-steps 5"
    command = [sys.executable, SCRIPT, "--smoke", "--lags", "1", "--out", tmp_path, "--", *small.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert (run["run"], run["steps"], run["balance"]) == ("addition-lag1-seed0", 3, 0)
    assert run["staleness_max"] <= 3
    assert len(run["curve"]) == 3
    assert (tmp_path / "pretrained.png").stat().st_size > 1000
