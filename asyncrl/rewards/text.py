"""Rewards that look at the text alone: exact match, containment, a regular expression, the form of a thought.

All are called as (prompt, response, target). A regular expression may run for ever on the wrong text; the reward
worker's timeout ends it, and the group is dropped as `reward_timeout`.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import msgspec

from asyncrl.rewards.answers import accepted, find, without_thinking


class ExactMatch(msgspec.Struct, frozen=True, kw_only=True):
    """1 when the answer is the target, or one of a list: the response's marked answer if it has one, or all of it."""

    ignore_case: bool = False
    """Compare without case."""

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        marked = find(response)
        answer = (marked if marked is not None else without_thinking(response)).strip()
        wanted = [text.strip() for text in accepted(target)]
        if self.ignore_case:
            return float(answer.casefold() in [text.casefold() for text in wanted])
        return float(answer in wanted)


class Contains(msgspec.Struct, frozen=True, kw_only=True):
    """1 when the target, or one of a list, occurs in what follows the thinking."""

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        shown = without_thinking(response)
        return float(any(text in shown for text in accepted(target)))


class RegexMatch(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """1 when the pattern is found; with a group in it, when what the last match's first group holds is the target."""

    pattern: str
    """A Python regular expression; `.` matches newlines too."""

    def __post_init__(self) -> None:
        try:
            _ = self._compiled
        except re.error as error:
            raise ValueError(f"not a regular expression: {self.pattern!r} ({error})") from None

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        found = list(self._compiled.finditer(response))
        if not found or not self._compiled.groups:
            return float(bool(found))
        return float((found[-1].group(1) or "").strip() in [text.strip() for text in accepted(target)])

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)


class ThinkingReward(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a thought: 1 for exactly one `<think>...</think>` at the start and an answer after it, or less.

    A quarter each for: one opening tag, one closing tag after it, a thought of `min_chars`, something after it. The
    opening tag may stand in the prompt (templates that open the thought themselves): then it must not come again.
    """

    tag: str = "think"
    """Name of the tag."""
    min_chars: int = 1
    """Shortest thought that counts."""
    opened: bool = False
    """The chat template opens the thought, so the response begins inside it."""

    def __call__(self, prompt: str, response: str, target: Any) -> float:
        text = f"<{self.tag}>{response}" if self.opened else response.lstrip()
        opens, closes = f"<{self.tag}>", f"</{self.tag}>"
        opened = text.startswith(opens) and text.count(opens) == 1
        if not opened:
            return 0.0
        thought, closed, rest = text.removeprefix(opens).partition(closes)
        if not closed or text.count(closes) != 1:
            return 0.25
        return 0.5 + 0.25 * (len(thought.strip()) >= self.min_chars) + 0.25 * bool(rest.strip())
