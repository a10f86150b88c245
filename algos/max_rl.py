"""MaxRL (2602.02710): maximise log p(success) instead of p(success), for rewards of 0 and 1.

    A = (R - group mean) / group mean                       0 for a group without success
    L = -[min(w, correction_cap)] A logp                    w = theta / mu; [.] stops the gradient
    weight 1 / B: the log-probability of the whole response

The weight is the correction `token_tis`; on fresh data it is 1. Leaves out: any trust region.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.corrections import CorrectionName
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("max_rl")
class MaxRL(Algorithm):
    """Hard prompts weigh more: the gradient of the log of the success rate."""

    objective: ObjectiveName = "reinforce"
    """The policy loss per token."""
    advantage: Advantage = "max_rl"
    """How rewards become advantages."""
    correction: CorrectionName = "token_tis"
    """Detached weight or mask for stale data."""
    aggregation: Aggregation = "sequence_sum"
    """How tokens are weighted over the optimiser step's whole batch."""
    correction_cap: float | None = 2.0
    """Largest weight."""
