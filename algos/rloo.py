"""RLOO (2402.14740): REINFORCE, each response against the mean of its siblings.

    A = R - mean of the other responses of the group = G / (G - 1) (R - group mean)
    L = -[min(w, correction_cap)] A logp                    w = theta / mu; [.] stops the gradient
    weight 1 / B: the log-probability of the whole response

The weight is the correction `token_tis`; on fresh data it is 1. Leaves out: the paper's KL in the reward
(`--algo.beta 0.05 --algo.kl_in reward`), and any trust region.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.corrections import CorrectionName
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("rloo")
class RLOO(Algorithm):
    """REINFORCE with the siblings as the baseline."""

    objective: ObjectiveName = "reinforce"
    """The policy loss per token."""
    advantage: Advantage = "leave_one_out"
    """How rewards become advantages."""
    correction: CorrectionName = "token_tis"
    """Detached weight or mask for stale data."""
    aggregation: Aggregation = "sequence_sum"
    """How tokens are weighted over the optimiser step's whole batch."""
    correction_cap: float | None = 2.0
    """Largest weight."""
