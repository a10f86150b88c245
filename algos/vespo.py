"""VESPO (2602.10693): a smooth weight on the whole response's ratio, from a variational argument.

    A = (R - mean) / (std + 1e-6) over the group
    L = -[W^k e^(lambda (1 - W))] A logp                    W the response's theta / mu; [.] stops the gradient
    k = 2, lambda = 3 where A > 0; k = 3, lambda = 2 where A <= 0
    every token of the batch weighs the same

The weight is 1 at W = 1, grows a little beyond it and dies off on both sides. Leaves out: nothing of the paper's loss.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("vespo")
class VESPO(Algorithm):
    """A smooth kernel on the ratio of the whole response."""

    objective: ObjectiveName = "vespo"
    """The policy loss per token."""
