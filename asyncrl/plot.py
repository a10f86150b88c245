"""`asyncrl plot RUN`: what a run looked like, as PNGs in RUN/plots. Reads metrics.jsonl and the trace; needs no
display.

Called by the command line and by the launcher at the end of a run. A figure whose metrics are missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.metrics import merge_traces, read_rows

Row = dict[str, Any]
LEDGER = ("trained", "buffered", "in_flight")
COLOURS = {
    "take": "#d9d9d9",
    "train": "#1f77b4",
    "generate": "#2ca02c",
    "publish": "#d62728",
    "weights": "#d62728",
    "commit": "#d62728",
    "checkpoint": "#9467bd",
}
"""Waiting grey, work blue and green, syncing red: the same in every run."""
LONGEST_TIMELINE_S = 30.0
"""The timeline shows the last this-many seconds: a whole run would be a grey block."""


def draw(run_dir: Path) -> list[Path]:
    """Write every figure there is data for; returns their paths. Raises ValueError when there is no data at all."""
    rows = read_rows(run_dir)
    if not rows:
        raise ValueError(f"{run_dir} has no metrics.jsonl with a row in it: nothing to draw yet")
    import matplotlib

    matplotlib.use("Agg")
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    figures: dict[str, Callable[[Any, list[Row]], bool]] = {
        "reward": _reward,
        "staleness": _staleness,
        "ledger": _ledger,
        "idle": _idle,
        "overview": _overview,
    }
    written = [path for name, fill in figures.items() if (path := _figure(folder / f"{name}.png", fill, rows))]
    trace = merge_traces(run_dir)
    if trace is not None:
        path = _figure(folder / "timeline.png", lambda figure, _: _timeline(figure, trace), rows)
        written += [path] if path else []
    return written


def _figure(path: Path, fill: Callable[[Any, list[Row]], bool], rows: list[Row]) -> Path | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    if not fill(figure, rows):
        return None
    figure.savefig(path, dpi=110)
    return path


def column(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it has a value."""
    pairs = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), int | float)]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _lines(axes: Any, rows: list[Row], names: dict[str, str], title: str) -> bool:
    """One line per metric that has values; `names` maps metric to label."""
    drawn = False
    for name, label in names.items():
        steps, values = column(rows, name)
        if values:
            axes.plot(steps, values, label=label, linewidth=1.4, marker="o" if len(values) < len(rows) / 2 else None)
            drawn = True
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(frameon=False)
    return drawn


def _reward(figure: Any, rows: list[Row]) -> bool:
    axes = figure.add_subplot()
    evaluated = sorted({k for r in rows for k in r if k.startswith(("eval/avg@", "eval/pass@")) and "_" not in k})
    names = {"reward/mean": "training"} | {k: k.removeprefix("eval/") for k in evaluated}
    return _lines(axes, rows, names, "Reward")


def _staleness(figure: Any, rows: list[Row]) -> bool:
    axes = figure.add_subplot()
    names = {"staleness/mean": "mean", "staleness/p95": "95th percentile", "staleness/max": "maximum"}
    return _lines(axes, rows, names, "Staleness of trained tokens, in versions")


def _idle(figure: Any, rows: list[Row]) -> bool:
    axes = figure.add_subplot()
    names = {"idle/trainer": "trainer", "idle/generator": "generators"}
    drawn = _lines(axes, rows, names, "Share of the time that was spent waiting")
    axes.set_ylim(0, 1)
    return drawn


def _ledger(figure: Any, rows: list[Row]) -> bool:
    """Every group that was started, by what became of it; the bands add up to `started`."""
    kept = [r for r in rows if all(isinstance(r.get(f"ledger/{n}"), int | float) for n in LEDGER)]
    if not kept:
        return False
    reasons = sorted({k for r in kept for k in r if k.startswith("dropped/")})
    names = [f"ledger/{n}" for n in LEDGER] + reasons
    labels = [n.replace("_", " ") for n in LEDGER] + [f"dropped: {r.removeprefix('dropped/')}" for r in reasons]
    axes = figure.add_subplot()
    axes.stackplot([r["step"] for r in kept], [[r.get(n) or 0 for r in kept] for n in names], labels=labels)
    axes.plot(*column(rows, "ledger/started"), "k--", linewidth=1, label="started")
    axes.set_title("Ledger: every group that was started", loc="left")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper left")
    return True


def _overview(figure: Any, rows: list[Row]) -> bool:
    top, bottom = figure.subplots(2, 2)
    _lines(top[0], rows, {"reward/mean": "reward"}, "Reward")
    _lines(top[1], rows, {"staleness/mean": "mean", "staleness/max": "max"}, "Staleness")
    _lines(bottom[0], rows, {"idle/trainer": "trainer", "idle/generator": "generators"}, "Idle")
    _lines(bottom[1], rows, {"policy/entropy": "entropy"}, "Entropy of the policy")
    return True


def _timeline(figure: Any, trace: Path) -> bool:
    """Who was busy, waiting or syncing over the last seconds of the run: a row per process."""
    events = json.loads(trace.read_bytes())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    if not spans:
        return False
    end = max(e["ts"] + e["dur"] for e in spans)
    start = max(min(e["ts"] for e in spans), end - LONGEST_TIMELINE_S * 1e6)
    axes, rows = figure.add_subplot(), sorted({e["pid"] for e in spans}, reverse=True)
    labels: dict[str, Any] = {}
    for span in (e for e in spans if e["ts"] + e["dur"] > start):
        left = max(span["ts"], start)
        width = span["ts"] + span["dur"] - left
        bar = axes.barh(
            rows.index(span["pid"]), width / 1e6, left=(left - start) / 1e6, height=0.7, color=_colour(span["name"])
        )
        labels.setdefault(span["name"], bar)
    axes.set_yticks(range(len(rows)), [names.get(pid, str(pid)) for pid in rows])
    axes.set_xlabel(f"seconds (the last {(end - start) / 1e6:.0f} of the run)")
    axes.set_title("Who was doing what", loc="left")
    axes.legend(labels.values(), labels.keys(), frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return True


def _colour(name: str) -> str:
    """Spans without a colour of their own get one by name."""
    from matplotlib import colormaps, colors

    return COLOURS.get(name) or colors.to_hex(colormaps["tab20"](sum(name.encode()) % 20))
