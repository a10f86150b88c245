"""Figures of a run: a timer whose spans become a trace, and the door to the trackers.

The trainer's rank 0 opens the trackers and logs one row per step; any process may keep a Timer. Nothing here imports
torch, and nothing here can stop a run (trackers.py drops what fails).

    timer = open_timer(run, role="trainer", index=0)
    with timer("take"):
        ...
    trackers = open_trackers(run)
    trackers.log({"step": 1, "version": 1, "reward/mean": 0.4, **timer.row()})
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from asyncrl.trackers import JsonlTracker, TensorboardTracker, Tracker, Trackers, WandbTracker

if TYPE_CHECKING:
    from asyncrl.settings import Run
    from asyncrl.types import Group

OTHERS: dict[str, Callable[[Run], Tracker]] = {"wandb": WandbTracker, "tensorboard": TensorboardTracker}
"""Trackers beside the JSON lines, by their name in metrics.trackers."""


class Timer:
    """Named spans of one process: seconds per name since the last `row()`, and an event per span for the trace."""

    def __init__(self, trace: IO[bytes] | None = None, *, process: str = "", pid: int = 0) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._trace, self._pid = trace, pid
        self._origin = time.time() - time.perf_counter()
        if trace is not None:
            self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})

    @contextmanager
    def __call__(self, name: str, **args: Any) -> Iterator[None]:
        """Time a block; also when it raises. `args` are shown beside the span in the trace."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), **args)

    def add(self, name: str, start: float, end: float, **args: Any) -> None:
        """A span measured elsewhere, in `time.perf_counter()` seconds of this process."""
        self._seconds[name] += end - start
        if self._trace is not None:
            begin = (self._origin + start) * 1e6  # wall clock, so that several processes line up
            event = {"ph": "X", "name": name, "ts": begin, "dur": (end - start) * 1e6, "pid": self._pid, "tid": 0}
            self._write({**event, "args": args})

    def row(self) -> dict[str, float]:
        """`time/<name>_s` for every span since the last call, which this resets."""
        row = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return row

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _write(self, event: dict[str, Any]) -> None:
        assert self._trace is not None
        self._trace.write(msgspec.json.encode(event) + b"\n")


ROLE_ORDER = {"trainer": 0, "replay": 100, "generator": 200}
"""Where a role's processes stand in the trace: their number there is this plus their index."""


def open_timer(run: Run, *, role: str, index: int = 0) -> Timer:
    """A Timer that writes its spans to logs/trace-<role>-<index>.jsonl, or nowhere when metrics.trace is off or the
    folder cannot be written to: a generator's host may have a copy of the configuration and no more."""
    if not run.config.metrics.trace:
        return Timer()
    folder = run.dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace = open(folder / f"trace-{role}-{index}.jsonl", "ab", buffering=1 << 16)  # noqa: SIM115 (closed by close)
    except OSError as error:
        print(f"asyncrl: warning: {role} {index} writes no trace: {error}", file=sys.stderr, flush=True)
        return Timer()
    return Timer(trace, process=f"{role} {index}", pid=ROLE_ORDER.get(role, 300) + index)


def merge_traces(run_dir: Path) -> Path | None:
    """Collect every process's spans into trace.json, which Perfetto and chrome://tracing open. None: no spans."""
    events = [line for path in sorted((run_dir / "logs").glob("trace-*.jsonl")) for line in _whole_lines(path)]
    if not events:
        return None
    temporary = run_dir / "trace.json.part"
    temporary.write_bytes(b'{"traceEvents": [\n' + b",\n".join(events) + b"\n]}\n")
    os.replace(temporary, run_dir / "trace.json")
    return run_dir / "trace.json"


def _whole_lines(path: Path) -> list[bytes]:
    """Lines that ended; a killed process may leave half of one."""
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]


def open_trackers(run: Run, *, step: int = 0) -> Trackers:
    """The trackers of a run that continues after `step` (0: a new run). Call once, in trainer rank 0.

    metrics.jsonl, samples.jsonl and trained.jsonl (the prompts of each step) are always written; rows beyond `step` are
    of an abandoned future and are cut.
    The console is drawn by the launcher from metrics.jsonl.
    """
    metrics = JsonlTracker(run.dir, after_step=step)
    others = {name: make(run) for name, make in OTHERS.items() if name in run.config.metrics.trackers}
    return Trackers(metrics, others, run.config.metrics.samples_per_step)


class Evaluated:
    """The lines that a generator appends to eval.jsonl, each given out once; those that are there already never."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "eval.jsonl"
        self._read = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> dict[str, float]:
        """eval/* of the newest evaluation that has ended since the last call; empty when none has."""
        if not self._path.exists():
            return {}
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return {}
        self._read += len(whole) + 1
        return msgspec.json.decode(whole.rpartition(b"\n")[2])


class Epochs:
    """data/epoch: how often the data was gone through, up to the furthest prompt that was trained on.

    `size` is the number of prompts of one pass; None where nobody knows it. What earlier launches have trained on is in
    trained.jsonl.
    """

    def __init__(self, run_dir: Path, *, size: int | None) -> None:
        self._size = size
        self._furthest = max((i for row in read_rows(run_dir, "trained.jsonl") for i in row["prompts"]), default=-1)

    def after(self, groups: Iterable[Group]) -> dict[str, float]:
        """The figure once these are trained on; nothing where it is not known. Prompt ids are positions in the data."""
        self._furthest = max([self._furthest, *(group.prompt.id for group in groups)])
        return {"data/epoch": (self._furthest + 1) / self._size} if self._size else {}


def write_progress(run_dir: Path, text: str) -> None:
    """What a run does before its first step, in a few words, for the launcher: `warm-up 60 of 120, loss 0.9`."""
    temporary = run_dir / "progress.part"
    temporary.write_text(text)
    os.replace(temporary, run_dir / "progress")


def read_progress(run_dir: Path) -> str:
    """The last of it; empty when nothing was written."""
    path = run_dir / "progress"
    return path.read_text() if path.exists() else ""


def read_rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Every whole row of a .jsonl file of the run folder; an empty list when there is none yet."""
    path = run_dir / name
    return [msgspec.json.decode(line) for line in _whole_lines(path)] if path.exists() else []
