"""`asyncrl envs check` from outside: the checks run in a process of their own, which may hang, crash or end.

`try_out` starts `python -m asyncrl.env_trial`, prints what that process finds as it finds it, bounds every step, and
says in plain words which step never came back. What `env_check.py` looks at is not known here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from asyncrl.env_check import LIMIT_S, OURS_S, Finding, Report, Step, Told, check, is_theirs
from asyncrl.roles import LAUNCHER, die_with_parent
from asyncrl.settings import load, resolve

GRACE_S = 1.0
"""What can be bounded inside the process is, and its own words come first."""


class Trial(msgspec.Struct, kw_only=True):
    """What is tried, as the command line says it."""

    target: str
    overrides: dict[str, Any] = {}
    imports: list[str] = []
    limit_s: float = LIMIT_S
    path: list[str] = []
    """sys.path of who asks: the same modules are found."""


FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
"""One line of faulthandler's stack, the innermost first."""
TOLD = msgspec.json.Decoder(Told | None)


def try_out(trial: Trial) -> bool:
    """Run the checks and print each finding at once, then the verdict; returns whether all is well."""
    report = Report(target=trial.target, tell=lambda told: print(told, flush=True))
    task = msgspec.json.encode(msgspec.structs.replace(trial, path=sys.path))
    with _process(task) as process:
        listen(report, process, trial.limit_s)
    print(report.verdict, flush=True)
    return report.ok


@contextlib.contextmanager
def _process(task: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """The other process, in a session of its own: what the environment has started is killed together with it."""
    command = [sys.executable, "-m", "asyncrl.env_trial", task.decode()]
    nothing, pipe, env = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, LAUNCHER: str(os.getpid())}
    with subprocess.Popen(command, stdin=nothing, stdout=pipe, env=env, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def listen(report: Report, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Consumes findings and steps; waits for the next one, no longer than a step may take; ends with the last."""
    assert process.stdout is not None
    step, lines = Step("starting", ours=True), _Lines(process.stdout)
    while True:
        bound_s = max(OURS_S, limit_s) if step.ours else limit_s
        try:
            line = lines.next(bound_s + GRACE_S)
        except TimeoutError:
            at = _where(process, lines)
            report.add("error", f"{step.what} has not come back within {bound_s:g} s{at} (--timeout-s sets the bound)")
            return
        if line is None:
            report.add("error", f"{step.what} ended the process it ran in ({_how(process.wait(OURS_S))})")
            return
        told = TOLD.decode(line)
        if told is None:
            return
        if isinstance(told, Step):
            step = told
        else:
            report.add(told.level, told.text)


class _Lines:
    """Lines of a pipe, each with a bound on the wait for it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._buffer = pipe, b""

    def next(self, timeout_s: float) -> bytes | None:
        """The next line, or None at the end. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(self._pipe.fileno(), 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


def _where(process: subprocess.Popen[bytes], lines: _Lines) -> str:
    """Where a process stands that does not come back: faulthandler writes its stack into the pipe when told to."""
    process.send_signal(signal.SIGUSR1)
    with contextlib.suppress(TimeoutError):
        while line := lines.next(GRACE_S):
            found = FRAME.fullmatch(line.decode(errors="replace"))
            if found and is_theirs(found[1]):
                return f"; it stands in {found[3]} ({found[1]}:{found[2]})"
    return ""


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def main(task: str) -> None:
    """The other process: what it finds goes through its standard output, what the environment prints to stderr."""
    die_with_parent()
    trial = msgspec.json.decode(task, type=Trial)
    sys.path[:] = trial.path
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, file=pipe)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it logs an ended task that we report
    last = Step("starting", ours=True)

    def tell(told: Told | None) -> None:
        nonlocal last
        last = told if isinstance(told, Step) else last
        pipe.write(msgspec.json.encode(told) + b"\n")

    def build() -> Any:
        return resolve(load(None, {**trial.overrides, "env.name": trial.target})).env

    try:
        check(trial.target, build=build, imports=trial.imports, limit_s=trial.limit_s, tell=tell)
    except (SystemExit, KeyboardInterrupt) as error:
        what = f"{type(error).__name__}({error})" if str(error) else type(error).__name__
        tell(Finding("error", f"{last.what} raises {what}, which would end the process it runs in"))
    tell(None)
    os._exit(0)  # past threads that the environment may have left


if __name__ == "__main__":
    main(sys.argv[1])
