"""TOPR (2503.14286): tapered off-policy REINFORCE.

    A = R - group mean
    L = -A logp                where A >= 0: imitation needs no weight
    L = -[min(W, 1)] A logp    where A < 0: W the response's theta / mu: what is unlikely already is left alone
    weight 1 / B: the log-probability of the whole response

The paper goes by the sign of the reward; with rewards of 0 and 1 nothing would ever taper, so the sign of A, the reward
less its baseline, decides here. Leaves out: the paper's resampling of the share of positives.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("topr")
class TOPR(Algorithm):
    """Negatives taper off as the policy leaves them behind; positives do not."""

    objective: ObjectiveName = "topr"
    """The policy loss per token."""
    advantage: Advantage = "group_mean"
    """How rewards become advantages."""
    aggregation: Aggregation = "sequence_sum"
    """How tokens are weighted over the optimiser step's whole batch."""
    topr_level: Literal["token", "sequence"] | None = "sequence"
    """Whose ratio tapers negatives"""
