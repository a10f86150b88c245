"""Dr. GRPO (2503.20783): GRPO without the divisions that bias it.

    A = R - group mean                                      no division by the std, which favours extreme prompts
    L = max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high))  x = theta / mu
    weight 1 / (B * max_tokens), a true constant            no division by the length, which favours long failures

Leaves out: nothing of the paper's loss; advantages are not scaled, so the learning rate depends on the reward's scale.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.registry import register_algo


@register_algo("dr_grpo")
class DrGRPO(Algorithm):
    """GRPO without its two biases."""

    advantage: Advantage = "group_mean"
    """How rewards become advantages."""
    aggregation: Aggregation = "constant"
    """How tokens are weighted over the optimiser step's whole batch."""
    clip_low: float | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.2
    """Upper clip of the ratio, at 1 + clip_high."""
