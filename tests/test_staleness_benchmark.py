"""The staleness benchmark's short form runs, and its last line is what CI and readers go by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "staleness.py"


@pytest.mark.slow
def test_the_quick_form_ends_in_final_success_by_algorithm_lag_and_seed():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=280, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"fade", "dapo", "delightful"} <= set(result)
    for by_lag in result.values():
        assert list(by_lag) == ["0", "16"]
        assert all(len(seeds) == 2 for seeds in by_lag.values())
    assert min(min(seeds) for seeds in result["fade"].values()) >= 0.99
