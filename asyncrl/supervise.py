"""Processes of a run as one crew: started in their own groups, watched, ended, and nothing left behind.

`launch.py` decides what runs and what a death means; this module only starts, sees and ends. It knows no role's meaning
and speaks to nobody over sockets. One thread calls it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.guard import MARK, sweep
from asyncrl.roles import LAUNCHER, describe_exit
from asyncrl.shared_gpu import ALONE

LOG_TAIL_LINES = 30
FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One process to start."""

    role: str
    index: int
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def who(self) -> tuple[str, int]:
        return self.role, self.index


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that was started, dead or alive."""

    spec: Spec
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    """time.monotonic() of the start: one clock for all processes of a machine, which nobody sets."""


class Crew:
    """Every process of a run. A context manager: leaving it, however that happens, leaves no process behind."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.mark = uuid.uuid4().hex
        self.children: list[Child] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Crew:
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "asyncrl.guard", self.mark]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
        sweep(self.mark)
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        for child in self.children:
            child.process.wait()

    def start(self, spec: Spec) -> Child:
        """Start a process in a session of its own, its output in logs/<role>-<index>.log."""
        log = self.run_dir / "logs" / f"{spec.role}-{spec.index}.log"
        env = {**os.environ, **ALONE, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **spec.env}
        env |= {MARK: self.mark, LAUNCHER: str(os.getpid())}
        started = time.monotonic()
        with open(log, "ab") as out:
            process = subprocess.Popen(
                spec.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        child = Child(spec=spec, process=process, log=log, started=started)
        self.children.append(child)
        return child

    def take_dead(self) -> list[Child]:
        """Children that ended since the last call, each once, with whatever they had started ended too."""
        dead = [c for c in self.children if c.process.poll() is not None]
        for child in dead:
            self.children.remove(child)
            _kill_group(child.process.pid)
        return dead

    def alive(self, *roles: str) -> list[Child]:
        return [c for c in self.children if c.spec.role in roles and c.process.poll() is None]

    def signal(self, number: signal.Signals, *roles: str) -> None:
        """Send a signal to every living process of these roles."""
        for child in self.alive(*roles):
            child.process.send_signal(number)

    def wait(self, *roles: str, timeout_s: float) -> bool:
        """Wait until no process of these roles lives. False: some still do."""
        deadline = time.monotonic() + timeout_s
        while self.alive(*roles):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


class Backoff:
    """How long to wait before the next restart: 0.5 s, doubling to 30 s; None when the budget is spent."""

    def __init__(self, max_restarts: int) -> None:
        self.left, self._delay_s = max_restarts, 0.5

    def next_delay_s(self) -> float | None:
        if self.left == 0:
            return None
        self.left, delay, self._delay_s = self.left - 1, self._delay_s, min(30.0, 2 * self._delay_s)
        return delay


class ErrorRecord(msgspec.Struct):
    """errors/<role>-<index>.json, as `roles.write_error` leaves it."""

    role: str
    index: int
    traceback: str
    at: float
    """time.monotonic()."""
    line: str = ""
    """The error in one line, for a person who needs no traceback."""


def first_error(run_dir: Path, *, since: float = 0.0, name: str = "*-*") -> ErrorRecord | None:
    """The earliest error file written after `since` (monotonic): what followed it is usually its consequence."""
    paths = (run_dir / "errors").glob(f"{name}.json")
    records = [msgspec.json.decode(p.read_bytes(), type=ErrorRecord) for p in paths]
    return min((r for r in records if r.at >= since), key=lambda r: r.at, default=None)


def clear_errors(run_dir: Path, names: Iterable[str] = ("*",)) -> None:
    for name in names:
        for path in (run_dir / "errors").glob(f"{name}.json"):
            path.unlink()


def obituary(child: Child, run_dir: Path) -> str:
    """Why a child ended, for the terminal: the first traceback there is, or the last lines of its log."""
    how, own = describe_exit(child.process.returncode), f"{child.spec.role}-{child.spec.index}"
    by_signal = child.process.returncode < 0  # then other errors are of those it left in the lurch
    record = first_error(run_dir, since=child.started, name=own if by_signal else "*-*")
    if record is not None and record.line:
        return f"{record.role} {record.index} ended the run: {record.line}"
    if record is not None:
        return f"{record.role} {record.index} failed:\n{record.traceback.rstrip()}"
    lines = child.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    said = "\n".join(lines) if lines else "(it wrote nothing)"
    return f"{child.spec.name} ended with {how}{_why(child, run_dir)}; the last lines of {child.log}:\n{said}"


def _why(child: Child, run_dir: Path) -> str:
    """What a process cannot say itself: that it had no room to, or that it was killed."""
    if child.process.returncode == -signal.SIGKILL:
        return ", which the kernel does when memory runs out"
    full = child.process.returncode > 0 and shutil.disk_usage(run_dir).free < FULL_BYTES
    return f": no space is left on the disk of {run_dir}" if full else ""


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
