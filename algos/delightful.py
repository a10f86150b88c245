"""Delightful policy gradient (2603.14608; off-policy 2603.20521): gate by advantage times surprise.

    A = (R - mean) / (std + 1e-6) over the group
    L = -[sigmoid(A * -logp / eta)] A logp                  [.] stops the gradient
    every token of the batch weighs the same

A surprising success counts fully, a surprising failure, which is what stale data is full of, hardly at all. It uses no
ratio, so staleness needs no recorded log-probabilities. It is not REINFORCE on fresh data: the gate is 1/2 for likely
tokens. Leaves out: nothing of the paper's loss.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("delightful")
class Delightful(Algorithm):
    """Weighs a token by how surprising it was and whether it paid off; needs no behaviour policy."""

    objective: ObjectiveName = "delightful"
    """The policy loss per token."""
    eta: float | None = 1.0
    """Temperature of the gate."""
