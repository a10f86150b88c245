"""The whole engine, disturbed: generators that stop and wake, or are all gone, and rewards that misbehave."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from test_launch_run import Launched, balances, launched, nobody_left  # noqa: F401 (launched is a fixture)

from asyncrl.metrics import read_rows

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
QUICK = {
    "training__batch-size": 4,
    "training__warmup-sft-steps": 0,
    "algo__n-samples": 2,
    "generation__max-tokens": 6,
    "checkpoint__export": "false",
    "metrics__trace": "false",
}


def processes(run: Launched) -> dict[str, dict]:
    """What status.json says of each process, by "role index"."""
    path = run.dir / "status.json"
    server = msgspec.json.decode(path.read_bytes())["server"] if path.exists() else {}
    return {f"{p['role']} {p['index']}": p for p in server.get("processes", [])}


def until(run: Launched, condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, run.text
        assert time.monotonic() < deadline, run.text
        time.sleep(0.05)


def status_of(run: Launched) -> str:
    """`asyncrl status RUN`, from another terminal."""
    command = [sys.executable, "-m", "asyncrl", "status", str(run.dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_generator_that_was_stopped_wakes_with_old_leases_and_goes_on(launched):  # noqa: F811
    run = launched(
        **QUICK,
        **{"import": HERE / "chaos_env.py", "env": "lasting", "env__seconds": 1.0, "training__steps": 400},
        **{"services__generator__num-replicas": 2, "supervise__dead-after-s": 2.0, "supervise__heartbeat-s": 0.3},
        **{"weights__timeout-s": 3.0},
    )
    until(run, lambda: processes(run).get("generator 1", {}).get("leases", 0) > 0)
    sleeper = run.process_of("generator", 1)
    sleeper.send_signal(signal.SIGSTOP)
    until(run, lambda: processes(run)["generator 1"]["silent"])
    stopped_at = max((row["step"] for row in read_rows(run.dir)), default=0)
    run.until_step(stopped_at + 3)  # the other one keeps the run going
    sleeper.send_signal(signal.SIGCONT)
    until(run, lambda: not (p := processes(run)["generator 1"])["silent"] and p["leases"] > 0)
    run.until_step(max(row["step"] for row in read_rows(run.dir)) + 3)
    assert sleeper.is_running()
    assert "generator 1 ended" not in run.text
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text
    rows = [row for row in read_rows(run.dir) if row["step"]]
    assert rows[-1]["dropped/expired"] > 0
    assert balances(run) == {0}
    assert max(row["staleness/max"] for row in rows) <= 4
    prompts = [p for row in read_rows(run.dir, "trained.jsonl") for p in row["prompts"]]
    assert len(prompts) == len(set(prompts))
    assert nobody_left(run)


def test_a_run_without_any_generator_is_diagnosed_and_then_ends_with_an_error(launched):  # noqa: F811
    run = launched(
        **QUICK,
        **{"import": HERE / "chaos_env.py", "env": "lasting", "training__steps": 400, "supervise__dead-after-s": 2.0},
        **{"supervise__heartbeat-s": 0.3, "supervise__grace-s": 12.0, "supervise__stall-s": 4.0},
        **{"weights__timeout-s": 2.0},
    )
    run.until_step(1)
    generator = run.process_of("generator")
    generator.send_signal(signal.SIGSTOP)
    trainer = run.process_of("trainer")
    until(run, lambda: "trainer waits" in status_of(run), 60)
    trainer.send_signal(signal.SIGUSR1)
    log = run.dir / "logs" / "trainer-0.log"
    until(run, lambda: "_await_batch" in log.read_text(), 20)  # where it stands
    until(run, lambda: re.search(r"trainer waits \d+ s: .*generator 0 last heard from \d+ s ago", status_of(run)), 60)
    assert run.wait(90) == 1
    assert "trainer has waited" in run.text
    assert "no generator has been alive for" in run.text
    assert "generator 0 last heard from" in run.text
    assert "failed, as of" in status_of(run)
    assert not psutil.pid_exists(generator.pid)
    assert nobody_left(run)


def test_rewards_that_hang_raise_or_are_no_numbers_are_counted_and_the_run_ends_well(launched):  # noqa: F811
    kinds = ["good"] * 5 + ["hang", "raise", "good", "nan", "text", "none", "crash"]
    run = launched(
        **QUICK,
        **{"import": HERE / "generation_env.py", "env": "moods", "env__kinds": kinds},
        **{"training__steps": 5, "generation__reward-timeout-s": 2.0},
    )
    assert run.wait(240) == 0, run.text
    rows = [row for row in read_rows(run.dir) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["dropped/reward_timeout"] >= 1
    assert rows[-1]["dropped/reward_error"] >= 5
    assert balances(run) == {0}
    trained = [kinds[p % len(kinds)] for row in read_rows(run.dir, "trained.jsonl") for p in row["prompts"]]
    assert trained == ["good"] * 20
    assert nobody_left(run)
