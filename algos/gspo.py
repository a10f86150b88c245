"""GSPO (2507.18071): the ratio, and so the clip, is that of the whole response.

    A = (R - mean) / (std + 1e-6) over the group
    s = exp(mean over the response of log x)                x = theta / mu
    L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))  each token gets the same share of s's gradient
    every response weighs the same

The bounds are on a mean of logs and so 500 times tighter than PPO's. Leaves out: the paper's four mini-batches per
batch (`--training.minibatches 4`).
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("gspo")
class GSPO(Algorithm):
    """The clip acts on the response: the geometric mean of its ratios."""

    objective: ObjectiveName = "gspo"
    """The policy loss per token."""
    aggregation: Aggregation = "sequence_mean"
    """How tokens are weighted over the optimiser step's whole batch."""
    clip_low: float | None = 0.0003
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.0004
    """Upper clip of the ratio, at 1 + clip_high."""
