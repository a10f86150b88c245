"""GRPO (2402.03300): PPO's clip with the group's mean and standard deviation as the baseline.

    A = (R - mean) / (std + 1e-6) over the group
    L = max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)) + beta KL(theta, ref)     x = theta / mu
    every response weighs the same, whatever its length

Leaves out: the paper's k3 estimator of the KL, whose gradient is biased (`--algo.kl k3` brings it back; k2 has the
right one), its beta of .04 (today's practice is far lower or 0), and several optimiser steps per batch
(`--training.minibatches`).
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.aggregation import Aggregation
from asyncrl.registry import register_algo


@register_algo("grpo")
class GRPO(Algorithm):
    """Group-normalised advantages, symmetric clip, KL to the reference."""

    aggregation: Aggregation = "sequence_mean"
    """How tokens are weighted over the optimiser step's whole batch."""
    clip_low: float | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.2
    """Upper clip of the ratio, at 1 + clip_high."""
    beta: float = 0.001
    """Weight of the KL penalty to the reference policy; 0 loads no reference."""
