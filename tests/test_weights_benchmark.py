"""The benchmark script runs, ends by itself and prints one line of JSON at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "weights.py"


@pytest.mark.slow
def test_the_benchmark_runs_over_gloo_and_its_last_line_is_json():
    command = [sys.executable, SCRIPT, "--smoke", "--repeats", "1", "--bucket-mib", "1", "--buffers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert result["bytes"] > 10_000_000
    for figure in ("raw_s", "each_s"):
        assert result[figure] > 0
    for stage in ("prepare_s", "wire_s", "commit_s", "pause_s", "total_s"):
        assert result["ours"][stage] > 0
