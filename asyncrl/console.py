"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere.

The launcher owns one Console and calls `update` several times a second. It reads metrics.jsonl as it grows and the
replay server's status as the launcher has it; it asks nobody and waits for nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from asyncrl.metrics import read_progress

if TYPE_CHECKING:
    from asyncrl.settings import Run

PLAIN_EVERY_S = 5.0
BARS = "▁▂▃▄▅▆▇█"
Row = dict[str, Any]


class Tail:
    """Whole new lines of a growing .jsonl file, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Row]:
        if not self._path.exists():
            return []
        size = self._path.stat().st_size
        self._offset = 0 if size < self._offset else self._offset  # cut by a resume
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line) for line in whole.splitlines() if line]


class Console:
    """A context manager; `note` prints a line that stays, `update` redraws what changes."""

    def __init__(self, run: Run, *, terminal: Terminal | None = None) -> None:
        self._run = run
        self._terminal = terminal or Terminal(highlight=False)
        self._tail = Tail(run.dir / "metrics.jsonl")
        self._rows: list[Row] = []
        self._printed = (0, 0.0)
        self._said = ("", 0.0)
        self._drawn: object = None
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._terminal,
        )
        self._task = self._progress.add_task("", total=run.config.training.steps)
        shown = self._terminal.is_terminal and "console" in run.config.metrics.trackers
        self._live = Live(console=self._terminal, auto_refresh=False, transient=True) if shown else None

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def last(self) -> Row:
        """The newest row, or an empty one."""
        return self._rows[-1] if self._rows else {}

    def note(self, text: str) -> None:
        """A line (or several) above the panel."""
        self._terminal.print(text, markup=False, soft_wrap=True)

    def update(self, status: Row, *, phase: str) -> list[Row]:
        """Show the newest row and who waits for whom. Returns the rows that are new."""
        new = self._tail.read()
        self._rows += new
        if self._live:
            self._progress.update(self._task, completed=int(self.last.get("step", 0)))
            self._live.update(Group(*self._panel(status, phase)), refresh=True)
        elif "console" in self._run.config.metrics.trackers:
            self._plain() if self._rows else self._before_first(phase)
        return new

    def _before_first(self, phase: str) -> None:
        """What happens before there is a row: said when it changes, at most every few seconds."""
        text, when = read_progress(self._run.dir) or phase, time.monotonic()
        if text != self._said[0] and when - self._said[1] >= PLAIN_EVERY_S:
            self._said = (text, when)
            self.note(text)

    def _plain(self) -> None:
        """The first row, the last, and one every few seconds."""
        step, when = int(self.last.get("step", 0)), time.monotonic()
        done = step == self._run.config.training.steps
        if step > self._printed[0] and (done or when - self._printed[1] >= PLAIN_EVERY_S):
            self._printed = (step, when)
            self.note(plain_line(self.last, self._run.config.training.steps))

    def _panel(self, status: Row, phase: str) -> list[Any]:
        config, last = self._run.config, self.last
        title = f"asyncrl {config.algo['name']} on {config.env['name']}, {config.run_dir}: {phase}"
        table = Table.grid(padding=(0, 2))
        for name, text in figures(last, status, config.replay.max_lag, config.replay.capacity_groups):
            table.add_row(Text(name, style="dim"), text)
        rewards = [r["reward/mean"] for r in self._rows if r.get("reward/mean") is not None]
        if rewards:
            table.add_row(Text("reward so far", style="dim"), sparkline(rewards))
        waits = [Text(f"{w['who']}: {w['why']}", style="yellow") for w in waiting(status, at_least_s=1.0)]
        if not self._rows and (progress := read_progress(self._run.dir)):
            return [Text(title, style="bold"), Text(progress)]
        return [Text(title, style="bold"), self._progress, table, *waits[:4]]


def figures(row: Row, status: Row, max_lag: int | None, capacity: int | None) -> list[tuple[str, str]]:
    """Name and text of each line of the panel, for what is known so far."""
    ledger = status.get("ledger", {})
    lines = []
    if "sft/loss" in row and row["step"]:
        lines.append(("loss", _number(row["sft/loss"], 3)))
    if "reward/mean" in row:
        lines.append(("reward", f"{_number(row['reward/mean'], 3)}"))
    if "staleness/mean" in row:
        mean, worst = row["staleness/mean"], row.get("staleness/max")
        lines.append(("staleness", f"mean {_number(mean, 2)}, max {_number(worst, 0)} of at most {max_lag}"))
    if status:
        flying = ledger.get("ledger/in_flight", 0)
        lines.append(("queue", f"{status.get('buffered', 0)} of {capacity} groups, {flying:.0f} in flight"))
    if "idle/trainer" in row:
        trainer, generator = _percent(row["idle/trainer"]), _percent(row.get("idle/generator"))
        lines.append(("idle", f"trainer {trainer}, generators {generator}"))
    made = sum(p.get("tokens_per_s", 0.0) for p in status.get("processes", []) if p.get("role") == "generator")
    if made or "throughput/trained_tokens_per_s" in row:
        trained = row.get("throughput/trained_tokens_per_s")
        lines.append(("tokens/s", f"generated {made:,.0f}, trained {_number(trained, 0)}"))
    return lines


def waiting(status: Row, *, at_least_s: float) -> list[Row]:
    """Requests that the server cannot answer yet, the longest wait first: `who`, `for_s`, `why`. Before them trainer
    ranks that are not heard from (`silent`), at once: the server waits before it says so."""
    found = [w for w in status.get("waiting", []) if w["for_s"] >= at_least_s or w.get("silent")]
    return sorted(found, key=lambda w: (not w.get("silent"), -w["for_s"]))


def plain_line(row: Row, steps: int) -> str:
    """One step as one line, of what the row knows."""
    known = {k: v for k, v in row.items() if v is not None}
    parts = [f"step {row['step']}/{steps}"]
    parts += [f"loss {known['sft/loss']:.3f}"] if "sft/loss" in known else []
    parts += [f"reward {known['reward/mean']:.3f}"] if "reward/mean" in known else []
    if "staleness/mean" in known:
        parts.append(f"staleness {known['staleness/mean']:.2f} (max {_number(known.get('staleness/max'), 0)})")
    parts += [f"queue {known['replay/buffered']:.0f}"] if "replay/buffered" in known else []
    if "throughput/generated_tokens_per_s" in known:
        parts.append(f"{known['throughput/generated_tokens_per_s']:,.0f} tokens/s")
    if "idle/trainer" in known:
        parts.append(
            f"idle trainer {_percent(known['idle/trainer'])} generators {_percent(known.get('idle/generator'))}"
        )
    return "  ".join([*parts, f"{row['time/elapsed_s']:.0f} s"])


def sparkline(values: list[float], width: int = 50) -> str:
    """Values as a line of bars between 0 (or their least) and 1 (or their greatest)."""
    low, high = min(0.0, *values), max(1.0, *values)
    count = min(width, len(values))
    shown = [values[int((i + 1) * len(values) / count) - 1] for i in range(count)]
    return "".join(BARS[round((v - low) / (high - low) * (len(BARS) - 1))] for v in shown)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
