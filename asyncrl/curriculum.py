"""Difficulty-aware sampling: prompts that are always or never solved rest for a while. Off by default.

The replay server passes the environment's prompts through it and tells it how each group fared. A group whose
responses are all right or all wrong teaches nothing (its advantages are zero), so its prompt is skipped the next times
it comes by: longer each time the outcome repeats. It acts on data that comes again (epochs of a dataset), or on kinds
of prompts that an environment names in `metadata`. It is pure; the journal keeps `records`, by what `changed` since it
last looked, beside the position in the stream: both stay where they are when a run goes back to a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from asyncrl.config import CurriculumConfig
from asyncrl.types import Prompt


@dataclass(slots=True)
class Record:
    """What is known of one prompt, or of one kind of prompts."""

    streak: int = 0
    """Groups in a row that were all right (positive) or all wrong (negative)."""
    rest: int = 0
    """Visits that are still skipped."""


class Curriculum:
    """`filter` the stream, `feedback` each group's mean reward, `metrics` for the log."""

    def __init__(self, config: CurriculumConfig, *, full_marks: float) -> None:
        self._config = config
        self._solved = config.solved if config.solved is not None else full_marks
        self.records: dict[str, Record] = {}
        self.changed: set[str] = set()
        """Keys of records that were made, altered or removed since the journal last looked."""
        self.skipped = 0
        self.seen = 0
        """Id after the last prompt that came by."""

    def filter(self, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
        """The prompts that do not rest, in order, ids unchanged. After `max_skips` in a row one is let through."""
        skips = 0
        for prompt in prompts:
            self.seen = prompt.id + 1
            record = self.records.get(key := self._key(prompt))
            if record is not None and record.rest > 0 and skips < self._config.max_skips:
                record.rest -= 1
                self.changed.add(key)
                skips += 1
                self.skipped += 1
                continue
            skips = 0
            yield prompt

    def feedback(self, prompt: Prompt, mean_reward: float) -> None:
        """How the group of a prompt fared: the mean of its rewards, NaN when nobody knows."""
        if not self._config.rest or math.isnan(mean_reward):
            return
        key, outcome = self._key(prompt), self._outcome(mean_reward)
        self.changed.add(key)
        if outcome == 0:
            self.records.pop(key, None)
            return
        record = self.records.setdefault(key, Record())
        record.streak = record.streak + outcome if record.streak * outcome > 0 else outcome
        doubled = self._config.rest << min(abs(record.streak) - 1, 16)
        record.rest = min(doubled, self._config.max_rest)

    def metrics(self) -> dict[str, float]:
        """curriculum/*: prompts skipped so far, and how many rest now as solved or as unsolved. Empty when off."""
        if not self._config.rest:
            return {}
        resting = [record for record in self.records.values() if record.rest > 0]
        return {
            "curriculum/skipped": float(self.skipped),
            "curriculum/resting_solved": float(sum(record.streak > 0 for record in resting)),
            "curriculum/resting_unsolved": float(sum(record.streak < 0 for record in resting)),
        }

    def _outcome(self, mean_reward: float) -> int:
        if mean_reward >= self._solved - 1e-6:
            return 1
        return -1 if mean_reward <= self._config.unsolved + 1e-6 else 0

    def _key(self, prompt: Prompt) -> str:
        """A prompt is known by its text, or by the entry of its metadata that names its kind."""
        named = prompt.metadata.get(self._config.key) if self._config.key else None
        return str(named) if named is not None else msgspec.json.encode(prompt.prompt).decode()
