"""Does the code of a response pass its tests? Each run is a process of its own, with limits, and without network.

What it protects from: code that never ends, eats memory, prints without end, writes large files, starts processes,
opens sockets, signals other processes, or leaves something running. What it does not protect from: code may read every
file that your user may read, and may write where your user may write. That is enough for what a model in training
writes by accident; it is no sandbox for hostile code. Run generators in a container for that.

Tests are Python (`assert` lines, or a list of them for credit in parts) or pairs of input and output; the standard
library is there, installed packages are not. The guard itself is in `code_guard.py`, which runs in the new process;
this file never executes a response.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.rewards.answers import without_thinking

GUARD = Path(__file__).with_name("code_guard.py")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may use."""

    time_s: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10
    file_bytes: int = 1 << 20


DEFAULT_LIMITS = Limits()


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `output` is stdout, cut at the limit; `error` says in words why it failed, or is empty."""

    output: str
    error: str
    verdicts: list[bool] = []
    """For Python tests: which passed."""


class CodeReward(msgspec.Struct, frozen=True, kw_only=True):
    """1 when all tests of the target pass; with `partial`, the share that pass."""

    partial: bool = False
    """Credit for the share of tests that pass."""
    limits: Limits = DEFAULT_LIMITS
    """Bounds of each run."""

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        code = extract_code(response)
        passed = self._passed(code, as_tests(target)) if code.strip() else []
        share = sum(passed) / len(passed) if passed else 0.0
        return share if self.partial else float(share == 1.0)

    def _passed(self, code: str, tests: Sequence[Any]) -> list[bool]:
        if isinstance(tests[0], str):
            verdicts = run(code, tests=list(tests), limits=self.limits).verdicts
            return verdicts + [False] * (len(tests) - len(verdicts))
        return [self._prints(code, case) for case in tests]

    def _prints(self, code: str, case: dict[str, str]) -> bool:
        ran = run(code, stdin=case["input"], limits=self.limits)
        return not ran.error and _lines(ran.output) == _lines(case["output"])


def extract_code(response: str) -> str:
    """The last fenced block of a response, or all of it when there is none."""
    answer = without_thinking(response)
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def as_tests(target: Any) -> Sequence[Any]:
    """A target -> tests: Python text, a list of it, or of {"input", "output"}; also as JSON text. Raises ValueError."""
    if isinstance(target, str) and target.lstrip().startswith(("[", "{")):
        target = json.loads(target)
    tests = target if isinstance(target, list) else [target]
    cases = all(isinstance(t, dict) and {"input", "output"} <= t.keys() for t in tests)
    if not tests or not (cases or all(isinstance(t, str) for t in tests)):
        raise ValueError("the target of a code reward must be Python asserts, or pairs of input and output")
    return tests


def run(code: str, *, tests: list[str] | None = None, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Ran:
    """Run `code`, then each of `tests` in its namespace, in a new guarded process. Never raises for what the code does.

    Raises RuntimeError where the guard cannot be set up (it needs Linux on x86-64 or ARM64).
    """
    key = secrets.token_hex(16)  # without it no output counts as a verdict, so printing "passed" is no way to pass
    job = {"code": code, "tests": tests, "key": key, "memory_bytes": limits.memory_bytes, "time_s": limits.time_s}
    job |= {"file_bytes": limits.file_bytes, "output_bytes": limits.output_bytes}
    with tempfile.TemporaryDirectory(prefix="asyncrl-code-") as folder:
        (Path(folder) / "stdin").write_text(stdin)
        output, why = _communicate(json.dumps(job).encode(), Path(folder), limits)
    return _read(output, why, key, expects_verdicts=tests is not None)


def _communicate(job: bytes, folder: Path, limits: Limits) -> tuple[bytes, str]:
    """Start the guard, hand it the job, read its output within the limits, and leave nothing of it behind."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(folder)},
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(job)
        process.stdin.close()
        return _bounded_output(process, limits)
    except BrokenPipeError:
        return b"", "the guard ended before it read its job"
    finally:
        # The whole session, also when the code itself has ended: what it started must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _bounded_output(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, str]:
    assert process.stdout is not None
    deadline, output = time.monotonic() + limits.time_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= limits.output_bytes:
            if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                return output, f"it took longer than {limits.time_s:g} s"
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return output, ""
            output += chunk
    return output[: limits.output_bytes], f"it printed more than {limits.output_bytes} bytes"


def _read(output: bytes, why: str, key: str, *, expects_verdicts: bool) -> Ran:
    """Split what the code printed from the guard's own last line."""
    text = output.decode(errors="replace")
    printed, found, report = text.rpartition(f"\n{key}")
    if not found:
        return Ran(output=text, error=why or "it ended without finishing")
    result = json.loads(report)
    if result["guard"]:
        raise RuntimeError(f"code cannot be run safely here: {result['guard']}")
    error = why or result["error"]
    return Ran(output=printed, error=error, verdicts=result["verdicts"] if expects_verdicts else [])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
