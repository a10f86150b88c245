"""REINFORCE (Williams 1992) with the group's mean as the baseline.

    A = R - group mean
    L = -[min(w, correction_cap)] A logp                    w = theta / mu; [.] stops the gradient
    weight 1 / B: the log-probability of the whole response

The weight is the correction `token_tis`; on fresh data it is 1. `--algo.correction none` is the textbook's form and is
refused while generation runs ahead. Leaves out: any trust region.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.corrections import CorrectionName
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("reinforce")
class Reinforce(Algorithm):
    """The plain policy gradient with a group baseline and capped importance weights."""

    objective: ObjectiveName = "reinforce"
    """The policy loss per token."""
    advantage: Advantage = "group_mean"
    """How rewards become advantages."""
    correction: CorrectionName = "token_tis"
    """Detached weight or mask for stale data."""
    aggregation: Aggregation = "sequence_sum"
    """How tokens are weighted over the optimiser step's whole batch."""
    correction_cap: float | None = 2.0
    """Largest weight."""
