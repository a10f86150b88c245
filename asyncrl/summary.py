"""The last lines of a run: what came of it, and where everything is. Called by the launcher once all have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.metrics import read_rows
from asyncrl.notices import dropped, skipped
from asyncrl.plot import draw

ENDS = 5
"""The reward at either end of a run is the mean over this many steps, or over its half if it is shorter."""


def summarise(run_dir: Path) -> list[str]:
    """Draw the plots, and say what happened in a line or two and where things are. Nothing to say without a step."""
    rows = read_rows(run_dir)
    if not rows:
        return [f"run folder  {run_dir} (no step was trained)"]
    draw(run_dir)
    lines = [_what_happened(rows), f"run folder  {run_dir}", f"plot        {run_dir / 'plots' / 'overview.png'}"]
    model, adapter = run_dir / "model", run_dir / "adapter"
    lines += [f"model       {model}"] if (model / "config.json").exists() else []
    return lines + ([f"adapter     {adapter}"] if (adapter / "adapter_config.json").exists() else [])


def changed_nothing(run_dir: Path, *, minibatches: int) -> bool:
    """Whether there were steps, each of `minibatches` optimiser steps, and not one of them moved the model."""
    rows = [row for row in read_rows(run_dir) if row.get("step") and row.get("tokens/trained")]
    return bool(rows) and all(skipped(row) >= minibatches for row in rows)


def _what_happened(rows: list[dict[str, Any]]) -> str:
    last = rows[-1]
    parts = [f"{last['step']} steps in {last['time/elapsed_s']:.0f} s"]
    rewards = [r["reward/mean"] for r in rows if r.get("reward/mean") is not None]
    if rewards:
        ends = max(1, min(ENDS, len(rewards) // 2))
        parts.append(f"reward {_mean(rewards[:ends]):.3f} -> {_mean(rewards[-ends:]):.3f}")
    losses = [r["sft/loss"] for r in rows if r.get("sft/loss") is not None and r["step"]]
    if losses:
        parts.append(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    lags = [r["staleness/mean"] for r in rows if r.get("staleness/mean") is not None]
    if lags:
        worst = max(r["staleness/max"] for r in rows if r.get("staleness/max") is not None)
        parts.append(f"staleness mean {_mean(lags):.2f}, max {worst:.0f}")
    if "ledger/balance" in last:
        balanced = all(r.get("ledger/balance", 0) == 0 for r in rows)
        state = "closed at every step" if balanced else "DID NOT CLOSE"
        gone = ", ".join(f"{n:.0f} {reason}" for reason, n in dropped(last).items())
        parts.append(f"ledger of {last['ledger/started']:.0f} groups {state}" + (f" (dropped: {gone})" if gone else ""))
    if unmoved := sum(skipped(row) for row in rows):
        parts.append(f"{unmoved:.0f} STEPS CHANGED NOTHING: loss or gradient not finite")
    return "; ".join(parts)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
