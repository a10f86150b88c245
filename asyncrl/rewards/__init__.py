"""Rewards that environments are made of: called as (prompt, response, target), they give a number, or named ones.

`reward_from` turns what a configuration says into one: a name, a name with a parameter, an import path, or several with
weights. Importing this package imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.env import Score, checked, total
from asyncrl.registry import import_user_module
from asyncrl.rewards.code import CodeReward
from asyncrl.rewards.math import MathReward
from asyncrl.rewards.text import Contains, ExactMatch, RegexMatch, ThinkingReward

__all__ = [
    "CodeReward",
    "Contains",
    "ExactMatch",
    "MathReward",
    "RegexMatch",
    "Reward",
    "ThinkingReward",
    "Weighted",
    "reward_from",
]

Reward = Callable[[str, str, Any], Score | Awaitable[Score]]
"""(prompt, response, target) -> a number or named numbers, sync or async."""

_NAMED: dict[str, Callable[[], Reward]] = {
    "math": MathReward,
    "exact": ExactMatch,
    "contains": Contains,
    "thinking": ThinkingReward,
    "code": CodeReward,
}


class Weighted:
    """Several rewards with weights: {"correct": (MathReward(), 1.0), "format": (ThinkingReward(), 0.2)}.

    Gives each part times its weight, so the parts add up to the reward; all are logged. Async parts run together.
    """

    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        if not parts:
            raise ValueError("a weighted reward needs at least one part")
        self.parts = dict(parts)

    def __call__(self, prompt: str, response: str, target: Any) -> Score | Awaitable[Score]:
        scores = {name: reward(prompt, response, target) for name, (reward, _) in self.parts.items()}
        if any(inspect.isawaitable(score) for score in scores.values()):
            return self._gathered(scores)
        return self._weighted(scores)

    async def _gathered(self, scores: dict[str, Any]) -> Score:
        waiting = {name: score for name, score in scores.items() if inspect.isawaitable(score)}
        done = await asyncio.gather(*waiting.values())
        return self._weighted({**scores, **dict(zip(waiting, done, strict=True))})

    def _weighted(self, scores: dict[str, Any]) -> dict[str, float]:
        return {name: total(checked(score)) * self.parts[name][1] for name, score in scores.items()}


def reward_from(spec: str | Mapping[str, float]) -> Reward:
    """What `env.reward` says -> a reward. Raises ValueError for a name or a function that is not there."""
    if not isinstance(spec, str):
        return Weighted({_label(name): (reward_from(name), weight) for name, weight in spec.items()})
    name, colon, parameter = spec.partition(":")
    if name == "regex" and colon:
        return RegexMatch(pattern=parameter)
    if colon:
        return _imported(name, parameter)
    if name not in _NAMED:
        known = ", ".join([*_NAMED, "regex:PATTERN", "my_module:function"])
        raise ValueError(f"no reward is called {name!r} (known: {known})")
    return _NAMED[name]()


def _label(name: str) -> str:
    """What a reward is logged as: its own name, or the function's."""
    head, _, parameter = name.partition(":")
    return parameter if parameter and head != "regex" else head


def _imported(module: str, name: str) -> Reward:
    found = getattr(import_user_module(module), name, None)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise ValueError(f"reward {module}:{name} must be a function of (prompt, response, target)")
    return found
