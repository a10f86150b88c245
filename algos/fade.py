"""Fade: a success may be imitated at any age, a failure counts while it is fresh. Ours, from benchmarks/staleness.py.

    A = (R - mean) / (std + 1e-6) over the group
    L = -[f] A logp                                         [.] stops the gradient
    f = 1 where A > 0, f = 2^(-lag / fade_half_life) where A < 0
    every token of the batch weighs the same

Pulling towards what was rewarded ends by itself as its probability nears 1; pushing away from what an old policy did
does not. At lag 0 the gradient is exactly that of REINFORCE, so nothing is given up on fresh data. It needs the version
of each token and no ratio, no proximal policy and no clip. Leaves out: any bound on positives, a KL (`--algo.beta`).
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.losses.corrections import CorrectionName
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.registry import register_algo


@register_algo("fade")
class Fade(Algorithm):
    """REINFORCE whose stale failures fade away."""

    objective: ObjectiveName = "reinforce"
    """The policy loss per token."""
    correction: CorrectionName = "fade"
    """Detached weight or mask for stale data."""
    fade_half_life: float | None = 1.0
    """Versions after which a token with A < 0 counts half."""
