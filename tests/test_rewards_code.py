"""Code of a response runs in a process that can do no harm by accident, and cannot claim to have passed."""

import contextlib
import os
import sys
import time

import psutil
import pytest

from asyncrl.rewards.code import CodeReward, Limits, as_tests, extract_code, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard is Linux's own")

GOOD, HALF = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a"
TESTS = ["assert add(1, 2) == 3", "assert add(1, 0) == 1"]


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


def test_all_tests_must_pass() -> None:
    assert CodeReward()("", fenced(GOOD), TESTS) == 1.0
    assert CodeReward()("", fenced(HALF), TESTS) == 0.0
    assert CodeReward(partial=True)("", fenced(HALF), TESTS) == 0.5


def test_programs_are_judged_by_what_they_print() -> None:
    cases = [{"input": "3\n", "output": "6\n"}, {"input": "4\n", "output": "8"}]
    assert CodeReward()("", fenced("print(int(input()) * 2)"), cases) == 1.0
    assert CodeReward(partial=True)("", fenced("print(6)"), cases) == 0.5


def test_the_last_block_is_the_answer() -> None:
    assert extract_code("```python\n1\n```\nbetter:\n```py\n2\n```") == "2\n"
    assert extract_code("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import socket; socket.socket()", "PermissionError"),
        (f"import os; os.kill({os.getpid()}, 9)", "PermissionError"),
        ("import os; os.setsid()", "PermissionError"),
        ("x = bytearray(1 << 33)", "MemoryError"),
        ("open('f', 'w').write('x' * (1 << 22))", "File too large"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("import os; os._exit(0)", "without finishing"),
        ("while True: print('x' * 1000)", "printed more"),
        ("import numpy", "ModuleNotFoundError"),
    ],
)
def test_what_code_must_not_do_fails_and_is_named(code: str, error: str) -> None:
    assert error in run(code).error


def test_code_that_never_ends_is_stopped_with_all_it_started() -> None:
    code = "import os\nprint(os.getpid(), flush=True)\nfor _ in range(3): os.fork()\nwhile True: pass"
    ran = run(code, limits=Limits(time_s=0.5))
    assert "took longer" in ran.error
    deadline = time.monotonic() + 10  # a killed process may take a moment to go
    while alive(int(ran.output)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(ran.output))


def alive(group: int) -> list[int]:
    """Processes of a group that still run (a zombie that nobody has reaped yet does not)."""
    living = (p for p in psutil.process_iter(["pid", "status"]) if p.info["status"] != psutil.STATUS_ZOMBIE)
    members = []
    for process in living:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                members.append(process.pid)
    return members


@pytest.mark.parametrize("cheat", ["import sys; sys.exit(0)", "import os; os._exit(0)", "print('passed')", ""])
def test_leaving_early_or_printing_is_no_way_to_pass(cheat: str) -> None:
    assert CodeReward(partial=True)("", fenced(cheat), TESTS) == 0.0


def test_a_program_may_exit() -> None:
    assert run("import sys; print(1); sys.exit(0)").error == ""


def test_the_environment_of_the_run_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PASSWORD", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").output


@pytest.mark.parametrize("bad", [[], 3, [1], [{"input": "x"}]])
def test_targets_that_are_no_tests_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="asserts"):
        as_tests(bad)


def test_tests_may_come_as_json_text() -> None:
    assert as_tests('[{"input": "1", "output": "2"}]') == [{"input": "1", "output": "2"}]
    assert as_tests("assert True") == ["assert True"]
