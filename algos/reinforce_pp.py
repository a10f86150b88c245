"""REINFORCE++ with baseline (2501.03262; the same advantage as LitePPO 2508.08221).

    A = (R - group mean) / (std of those over the whole batch + 1e-6)
    L = max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high))  x = theta / mu
    every token of the batch weighs the same

One scale for the batch does not blow up prompts whose rewards hardly differ. Leaves out: the paper's KL
(`--algo.beta 0.001`); its form without groups is `--algo.advantage batch`.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.registry import register_algo


@register_algo("reinforce_pp")
class ReinforcePP(Algorithm):
    """Group baseline, batch-wide scale, PPO clip."""

    advantage: Advantage = "batch_norm"
    """How rewards become advantages."""
    clip_low: float | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.2
    """Upper clip of the ratio, at 1 + clip_high."""
