"""M2PO (2510.01161): clip only as much as the second moment of the log-ratio demands.

    A = (R - mean) / (std + 1e-6) over the group
    D = log x over the H tokens of the batch where a clip could act (A > 0, x > 1 or A < 0, x < 1)     x = theta / mu
    tau = the largest value with sum min(D^2, tau^2) <= moment_budget * H
    L = max(-A x, -A clip(x, e^-tau, e^tau)), never tighter than [1 - clip_low, 1 + clip_high]
    every token of the batch weighs the same

tau is that of the whole optimiser step, whatever the micro-batches, read off a histogram (0.5 % bins). It is taken with
the weights of the start of the batch. Leaves out: nothing of the published code's loss.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("m2po")
class M2PO(Algorithm):
    """A clip range that the batch itself sets, from the second moment of the log-ratio."""

    objective: ObjectiveName = "m2po"
    """The policy loss per token."""
    moment_budget: float | None = 0.04
    """Mean squared log-ratio that the clip leaves."""
    clip_low: float | None = 0.3
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.5
    """Upper clip of the ratio, at 1 + clip_high."""
