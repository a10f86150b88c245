"""SAPO (2511.20347): a sigmoid gate in the place of the clip.

    A = (R - mean) / (std + 1e-6) over the group
    L = -(4 / tau) sigmoid(tau (x - 1)) A                   x = theta / mu; tau by the sign of A
    every response weighs the same

The gradient falls off smoothly on both sides of x = 1, faster for negatives. Leaves out: nothing of the paper's loss.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("sapo")
class SAPO(Algorithm):
    """A smooth gate where PPO clips."""

    objective: ObjectiveName = "sapo"
    """The policy loss per token."""
    aggregation: Aggregation = "sequence_mean"
    """How tokens are weighted over the optimiser step's whole batch."""
    tau_positive: float | None = 1.0
    """Temperature of the gate where A > 0."""
    tau_negative: float | None = 1.05
    """Temperature of the gate where A <= 0."""
