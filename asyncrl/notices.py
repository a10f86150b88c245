"""What a person should hear of while a run goes on: groups that failed, steps that were skipped. Pure; the launcher
says it, the summary and `asyncrl status` repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

ORDINARY = frozenset({"filtered", "expired", "stale", "aborted"})
"""Reasons for which groups are dropped in a run that is well."""
MANY, MOST = 500, 0.8
"""From so many filtered groups on, and this part of all, it is said what may be done about them."""
LARGER = 4
"""How much larger the groups are that are advised when nearly all are filtered, and how many fewer."""
GROWTH = 10
"""What was said is said again once there is so many times more of it."""


class Notices:
    """Each notice at its first occurrence, and again when its number has grown GROWTH times.

    What may be done about filtered groups depends on the run's full marks, group size and groups per batch.
    """

    def __init__(self, *, full_marks: float = 1.0, n_samples: int = 8, batch_size: int = 32) -> None:
        self._full_marks, self._n_samples, self._batch_size = full_marks, n_samples, batch_size
        self._said: dict[str, float] = {}
        self._skipped = 0.0

    def of_status(self, status: Row) -> list[str]:
        """Groups that failed, with the last error of each kind, as the replay server knows them."""
        ledger, why = status.get("ledger", {}), status.get("why_dropped", {})
        counts = {r: n for r, n in dropped(ledger).items() if r not in ORDINARY}
        return self._of_filtered(ledger, status.get("dropped_reward")) + [
            f"{n:.0f} {'group was' if n == 1 else 'groups were'} dropped, {reason}{_last(why.get(reason))}"
            for reason, n in counts.items()
            if self._news(reason, n)
        ]

    def _of_filtered(self, ledger: Row, reward: float | None) -> list[str]:
        """Dynamic sampling that leaves next to nothing over. `reward`: the mean of what it dropped."""
        filtered, started = float(ledger.get("dropped/filtered", 0)), float(ledger.get("ledger/started", 0))
        if filtered < max(MANY, MOST * started) or not self._news("filtered", filtered):
            return []
        mean = "" if reward is None else f", {reward:.2g} on average"
        return [
            f"{filtered:.0f} of {started:.0f} groups were filtered, because all their responses got the same reward"
            f"{mean}; {self._advice(reward)}"
        ]

    def _advice(self, reward: float | None) -> str:
        """Rare successes are found in few large groups: a step has as many responses, and drops fewer."""
        if reward is not None and reward >= self._full_marks / 2:
            return "too easy for this model: try harder prompts, or --curriculum.rest 2 where prompts come again"
        few, large = max(1, self._batch_size // LARGER), self._n_samples * LARGER
        return (
            f"try fewer, larger groups in a new run (--training.batch-size {few} --algo.n-samples {large}), easier "
            "prompts, or supervised training first"
        )

    def of_rows(self, rows: Iterable[Row]) -> list[str]:
        """Steps that changed nothing because something was not finite, and demonstrations that do not fit."""
        lines = []
        for row in rows:
            self._skipped += skipped(row)
            if skipped(row) and self._news("skipped", self._skipped):
                lines.append(f"step {row['step']} changed nothing: its loss or a gradient was not finite")
            if (long := row.get("sft/too_long")) and self._news("too_long", long):
                lines.append(f"demonstrations left out so far: {long:.0f}, longer than training.seq_len")
        return lines

    def _news(self, key: str, number: float) -> bool:
        if number < GROWTH * self._said.get(key, 1 / GROWTH):
            return False
        self._said[key] = number
        return True


def dropped(ledger: Row) -> dict[str, float]:
    """Groups by the reason for which they were dropped, of a row or of the server's ledger; the most first."""
    counts = {k.removeprefix("dropped/"): float(v) for k, v in ledger.items() if k.startswith("dropped/") and v}
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def skipped(row: Row) -> float:
    """Optimiser steps of a row that were not taken although there were tokens to train on."""
    return float(row.get("optimizer/skipped") or 0.0) if row.get("tokens/trained") else 0.0


def _last(why: str | None) -> str:
    return f"; the last: {why}" if why else ""
