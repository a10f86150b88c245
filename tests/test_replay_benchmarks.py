"""The replay benchmarks run in their short form, and end with one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("script", ["replay", "fuzz", "soak"])
def test_benchmark_prints_a_table_and_a_line_of_json(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, line = done.stdout.strip().splitlines()
    assert table
    assert json.loads(line)["benchmark"] == script
