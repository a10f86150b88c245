"""Where figures go: JSON lines always, W&B and TensorBoard when asked. What hangs or fails is dropped with a warning.

`metrics.open_trackers` builds these; trainer rank 0 calls `log`, `samples`, `close`. The JSON lines are written at
once, in the caller's thread, so that a row that was logged is on disk. Every other tracker lives in a thread of its own
behind a bounded queue: nothing it does can delay a step, fail a run or hold its exit longer than CLOSE_S.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from asyncrl.types import NOT_SAMPLED, Episode, Group

if TYPE_CHECKING:
    from asyncrl.settings import Run

CLOSE_S = 15.0
QUEUE_ROWS = 256
Row = dict[str, Any]


class Tracker(Protocol):
    """What a tracker must do. All calls come from one thread of its own; any may raise."""

    def start(self) -> None: ...

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run. `log` never blocks and never raises on a tracker's account."""

    def __init__(self, jsonl: JsonlTracker, others: Mapping[str, Tracker], samples_per_step: int) -> None:
        self._jsonl: JsonlTracker | None = jsonl
        self._threads = [_Background(name, tracker) for name, tracker in others.items()]
        self._samples_per_step = samples_per_step
        self._start = time.monotonic() - jsonl.elapsed_s

    def log(self, row: Mapping[str, Any]) -> None:
        """One row per step. `step` and `version` are required; `time/elapsed_s` is added, NaN becomes null."""
        assert {"step", "version"} <= row.keys(), f"a row needs step and version, got {sorted(row)}"
        plain = {k: _plain(v) for k, v in row.items()}
        plain.setdefault("time/elapsed_s", time.monotonic() - self._start)
        self._write("metrics", [plain])
        for thread in self._threads:
            thread.log(plain)

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """Write `metrics.samples_per_step` episodes, taken evenly over the groups, to samples.jsonl."""
        pairs = [(g, e) for g in groups for e in g.episodes]
        picked = np.linspace(0, len(pairs) - 1, min(self._samples_per_step, len(pairs))).astype(int)
        self._write("samples", [_sample(step, *pairs[i]) for i in picked])

    def trained(self, step: int, groups: Iterable[Group]) -> None:
        """Which prompts `step` trained on, to trained.jsonl: what a resumed run is checked by."""
        self._write("trained", [{"step": step, "prompts": [group.prompt.id for group in groups]}])

    def close(self) -> None:
        """Flush and end everything; waits at most CLOSE_S for each tracker."""
        for thread in self._threads:
            thread.close()
        if self._jsonl is not None:
            self._jsonl.close()

    def _write(self, name: str, rows: list[Row]) -> None:
        if self._jsonl is None:
            return
        try:
            self._jsonl.write(name, rows)
        except OSError as error:
            _warn("jsonl", f"cannot write: {error}")
            self._jsonl = None


class JsonlTracker:
    """metrics.jsonl, samples.jsonl and trained.jsonl of a run folder, appended line by line."""

    def __init__(self, run_dir: Path, *, after_step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.elapsed_s = 0.0
        self._files: dict[str, IO[bytes]] = {}
        for name in ("metrics", "samples", "trained"):
            path = run_dir / f"{name}.jsonl"
            kept = _rows_until(path, after_step)
            if name == "metrics" and kept:
                self.elapsed_s = float(kept[-1].get("time/elapsed_s") or 0.0)
            temporary = path.with_suffix(".part")
            temporary.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
            os.replace(temporary, path)
            self._files[name] = open(path, "ab")  # noqa: SIM115 (closed by close)

    def write(self, name: str, rows: list[Row]) -> None:
        """Append rows; they are with the operating system when this returns."""
        file = self._files[name]
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class WandbTracker:
    """Weights & Biases. Offline unless this machine is logged in or WANDB_MODE says otherwise."""

    def __init__(self, run: Run) -> None:
        self._config, self._dir = run.config, run.dir
        self._run: Any = None

    def start(self) -> None:
        import wandb  # an extra, and slow to import: here, in the tracker's own thread

        self._run = wandb.init(
            project=self._config.metrics.wandb_project,
            name=self._dir.name,
            dir=str(self._dir),
            config=msgspec.to_builtins(self._config),
            mode=_wandb_mode(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """TensorBoard's event files in RUN/tensorboard, as float32; a resume hides what came after its checkpoint."""

    def __init__(self, run: Run) -> None:
        self._dir = run.dir / "tensorboard"
        self._writer: Any = None

    def start(self) -> None:
        import torch.utils.tensorboard  # noqa: F401 (it needs an extra: what fails, fails before the first row)

    def log(self, row: Row) -> None:
        from torch.utils.tensorboard import SummaryWriter

        step = int(row["step"])
        if self._writer is None:
            self._writer = SummaryWriter(str(self._dir), purge_step=step)
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Background:
    """One tracker in one daemon thread, fed by a bounded queue; dropped at its first failure or overflow."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: queue.Queue[Row | None] = queue.Queue(QUEUE_ROWS)
        self._dropped = False
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        if self._dropped:
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._drop(f"it has not taken a row for {QUEUE_ROWS} steps")

    def close(self) -> None:
        if not self._dropped:
            try:
                self._queue.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._drop(f"it did not finish within {CLOSE_S:.0f} s")

    def _serve(self) -> None:
        """Consumes: rows. Waits for: the queue. Unblocked by: log() and close(). Produces: calls of the tracker."""
        try:
            self._tracker.start()
            while (row := self._queue.get()) is not None:
                self._tracker.log(row)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 (somebody else's code: whatever it raises must not stop a run)
            self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, why: str) -> None:
        self._dropped = True
        _warn(self._name, why)


def _warn(name: str, why: str) -> None:
    print(f"asyncrl: warning: tracker {name} is dropped, the run goes on: {why}", file=sys.stderr, flush=True)


def _wandb_mode() -> Literal["offline"] | None:
    """None leaves the choice to W&B; offline when it would otherwise ask for a login and wait."""
    netrc = Path.home() / ".netrc"
    logged_in = "WANDB_API_KEY" in os.environ or (netrc.exists() and "wandb" in netrc.read_text())
    return None if logged_in or "WANDB_MODE" in os.environ else "offline"


def _rows_until(path: Path, step: int) -> list[Row]:
    if step == 0 or not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [row for row in map(msgspec.json.decode, lines) if row["step"] <= step]


def _plain(value: Any) -> Any:
    """Numpy and torch scalars as Python numbers; text as it is."""
    return value.item() if hasattr(value, "item") else value


def _sample(step: int, group: Group, episode: Episode) -> Row:
    sampled = episode.versions[episode.versions != NOT_SAMPLED]
    return {
        "step": step,
        "prompt": group.prompt.prompt,
        "target": group.prompt.target,
        "text": episode.text,
        "reward": episode.reward,
        "rewards": episode.rewards,
        "finish_reason": episode.finish_reason,
        "num_tokens": episode.num_tokens,
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else [],
    }
