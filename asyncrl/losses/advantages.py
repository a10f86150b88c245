"""Rewards -> advantages: one function per estimator, float64 (P, G) -> float64 (P, G).

Called by `Algorithm.advantages` with the rewards of a whole batch, one row per prompt. Nothing here knows in which
order groups arrived, and equal rewards give zero, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

Advantage = Literal["group_norm", "group_mean", "leave_one_out", "batch_norm", "batch", "max_rl", "raw"]

EPSILON = 1e-6
"""Added to standard deviations."""


def group_norm(rewards_PG: np.ndarray) -> np.ndarray:
    """(R - group mean) / (group std + 1e-6), unbiased std (GRPO, 2402.03300)."""
    centred_PG = group_mean(rewards_PG)
    return centred_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + EPSILON)


def group_mean(rewards_PG: np.ndarray) -> np.ndarray:
    """R - group mean: no division that would favour prompts of low variance (Dr. GRPO, 2503.20783)."""
    return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)


def leave_one_out(rewards_PG: np.ndarray) -> np.ndarray:
    """R - mean of the siblings' rewards = G / (G - 1) * (R - group mean) (RLOO, 2402.14740)."""
    size = rewards_PG.shape[1]
    return group_mean(rewards_PG) * (size / (size - 1))


def batch_norm(rewards_PG: np.ndarray) -> np.ndarray:
    """(R - group mean) / (std of those over the whole batch + 1e-6) (REINFORCE++ with baseline, 2501.03262)."""
    centred_PG = group_mean(rewards_PG)
    return centred_PG / (centred_PG.std(ddof=1) + EPSILON)


def batch(rewards_PG: np.ndarray) -> np.ndarray:
    """(R - batch mean) / (batch std + 1e-6): needs no group, works with one response per prompt (REINFORCE++)."""
    spread = rewards_PG.std(ddof=1) if rewards_PG.size > 1 else 0.0
    return (rewards_PG - rewards_PG.mean()) / (spread + EPSILON)


def max_rl(rewards_PG: np.ndarray) -> np.ndarray:
    """(R - group mean) / group mean for rewards of 0 and 1; a group without success gives 0 (MaxRL, 2602.02710)."""
    if rewards_PG.size and rewards_PG.min() < 0:
        raise ValueError(
            f"advantage 'max_rl' needs rewards of 0 and 1, got {rewards_PG.min():g}: choose --algo.advantage group_norm"
        )
    mean_P1 = rewards_PG.mean(axis=1, keepdims=True)
    return np.where(mean_P1 > 0, group_mean(rewards_PG) / np.where(mean_P1 > 0, mean_P1, 1.0), 0.0)


def raw(rewards_PG: np.ndarray) -> np.ndarray:
    """R itself: no baseline."""
    return rewards_PG.copy()


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_norm": batch_norm,
    "batch": batch,
    "max_rl": max_rl,
    "raw": raw,
}
NEED_A_GROUP = frozenset({"group_norm", "group_mean", "leave_one_out", "batch_norm", "max_rl"})
"""Estimators whose baseline is the siblings: a single response would have advantage 0 or NaN."""


def compute(name: str, rewards_PG: np.ndarray) -> np.ndarray:
    """Apply the estimator `name`. Raises ValueError for a group of one under a group baseline, or NaN."""
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards must be (prompts, siblings), got shape {rewards_PG.shape}")
    if not np.isfinite(rewards_PG).all():
        raise ValueError("rewards must be finite, got NaN or infinity: let the environment's reward return a number")
    if name in NEED_A_GROUP and rewards_PG.shape[1] < 2:
        raise ValueError(group_of_one(name))
    return ADVANTAGES[name](rewards_PG)


def group_of_one(name: str) -> str:
    """The refusal, shared with the check at start-up."""
    return (
        f"advantage {name!r} compares siblings, and n_samples is 1: "
        "set --algo.n_samples 2 or more, or --algo.advantage batch"
    )
