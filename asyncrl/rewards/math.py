"""Is the answer mathematically the reference answer? Numbers first, then math-verify for expressions.

Environments call it in reward workers. It sets no timer of its own (math-verify's are signals, which work in a main
thread only): a symbolic comparison that never ends is stopped by the worker's timeout.
"""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from typing import Any

import msgspec

from asyncrl.rewards.answers import accepted, find, last_number, without_thinking


class MathReward(msgspec.Struct, frozen=True, kw_only=True):
    """(prompt, response, target) -> {"correct": 1.0 or 0.0}, and {"format": ..} when partial credit is given."""

    format_reward: float = 0.0
    """Partial credit: reward for an answer that is marked as asked and wrong."""
    tolerance: float = 0.0
    """Relative difference up to which two numbers count as equal."""
    last_number: bool = False
    """Without a marked answer, take the last number of the response."""

    def __call__(self, prompt: str, response: str, target: Any) -> dict[str, float]:
        marked = find(response)
        answer = marked if marked is not None or not self.last_number else last_number(without_thinking(response))
        wanted = accepted(target)
        correct = answer is not None and any(equal(answer, text, tolerance=self.tolerance) for text in wanted)
        score = {"correct": float(correct)}
        if self.format_reward:
            score["format"] = self.format_reward if marked is not None and not correct else 0.0
        return score


def equal(answer: str, target: str, *, tolerance: float = 0.0) -> bool:
    """True when both mean the same number, or are equivalent expressions. The target may be LaTeX or plain."""
    ours, theirs = number(answer), number(target)
    if ours is not None and theirs is not None:
        return ours == theirs or math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=0.0)
    if answer.strip() == target.strip():
        return True
    return _verify(answer, target)


def number(text: str) -> Fraction | None:
    """A plain number, thousands separators, currency signs, percent and a final full stop allowed; otherwise None."""
    bare = text.strip().strip("$").removesuffix(".").removesuffix("%").removeprefix("\\$").replace(",", "").strip()
    if len(bare) > 50 or "e" in bare.lower():  # 1e999999999 would be computed digit by digit
        return None
    try:
        return Fraction(bare)
    except (ValueError, ZeroDivisionError):
        return None


def _verify(answer: str, target: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that no timer is set
    gold = parse(f"\\boxed{{{target}}}", parsing_timeout=None)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(gold) and bool(given) and bool(verify(gold, given, timeout_seconds=None))
