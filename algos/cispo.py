"""CISPO (2506.13585, ScaleRL 2510.13786): cap the weight of a token instead of clipping its gradient away.

    A = (R - mean) / (std + 1e-6) over the group
    L = -[min(x, weight_max)] A logp                        x = theta / mu; [.] stops the gradient
    every token of the batch weighs the same

`weight_max` is absolute; other libraries write the same bound as 1 + epsilon. Leaves out: any bound on negatives. A cap
is no trust region: see docs/algorithms.md on staleness.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("cispo")
class CISPO(Algorithm):
    """Every token keeps its gradient; its weight is capped."""

    objective: ObjectiveName = "cispo"
    """The policy loss per token."""
    weight_max: float | None = 5.0
    """Absolute cap on the ratio."""
