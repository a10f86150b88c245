"""A trainer rank that is stopped (SIGSTOP stands for a frozen host): it is named within seconds; the run goes on when
it wakes up, and ends with its name when it does not."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from test_launch_run import Launched, balances, launched, nobody_left  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


def until(run: Launched, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.process.poll() is None, run.text
        assert time.monotonic() < deadline, run.text
        time.sleep(0.1)


def status(run: Launched) -> str:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", "status", str(run.dir)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(("ranks", "frozen"), [(3, 0)])
def test_a_frozen_rank_is_named_and_the_run_goes_on_when_it_wakes_up(launched, ranks, frozen):  # noqa: F811
    run = launched(services__trainer__procs=ranks, training__steps=60)
    run.until_step(2)
    process = run.process_of("trainer", frozen)
    process.send_signal(signal.SIGSTOP)
    named = f"trainer waits for rank {frozen} \\(host [^ ,]+, pid {process.pid}\\), not heard from for \\d+ s"
    until(run, lambda: re.search(f"asyncrl: {named}", run.text))
    assert re.search(f"trainer waits \\d+ s: {named}", status(run))
    other = run.dir / "logs" / f"trainer-{1 - frozen}.log"
    until(run, lambda: re.search(f"asyncrl.training.pulse .*{named}", other.read_text()))
    process.send_signal(signal.SIGCONT)
    assert run.wait(120) == 0, run.text
    assert balances(run) == {0}
    assert "every rank is heard from again" in other.read_text()


@pytest.mark.parametrize(("ranks", "frozen"), [(2, 1), (1, 0)])
def test_a_rank_that_stays_frozen_ends_the_run_with_its_name(launched, ranks, frozen):  # noqa: F811
    run = launched(services__trainer__procs=ranks, training__steps=4000, supervise__stall_limit_s=20)
    run.until_step(2)
    process = run.process_of("trainer", frozen)
    process.send_signal(signal.SIGSTOP)
    assert run.wait(90) == 1
    rank = f"rank {frozen} " if ranks > 1 else ""
    assert re.search(f"trainer .*{rank}\\(host [^ ,]+, pid {process.pid}\\), not heard from for [23]\\d s", run.text)
    assert "Traceback" not in run.text
    assert nobody_left(run)
