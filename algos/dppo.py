"""DPPO (2602.04879), the binary total-variation form: bound how far a token's probability moves.

    A = (R - mean) / (std + 1e-6) over the group
    L = -[min(x, weight_max)] A logp                        x = theta / mu; [.] stops the gradient
    masked where A > 0 and p - q > divergence, or A <= 0 and p - q < -divergence       p of theta, q of mu
    every token of the batch weighs the same

A rare token may double its probability many times before it is masked; a likely one may not fall far. Leaves out: the
top-k form of the divergence, which needs the behaviour policy's other probabilities.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("dppo")
class DPPO(Algorithm):
    """A trust region on probabilities, not ratios."""

    objective: ObjectiveName = "dppo_tv"
    """The policy loss per token."""
    divergence: float | None = 0.2
    """How far a probability may move along A before its token is masked."""
    weight_max: float | None = 20.0
    """Absolute cap on the ratio."""
