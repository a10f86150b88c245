"""Decoupled PPO (AReaL 2505.24298): the clip's centre is not the policy that sampled.

    A = (R - mean) / (std + 1e-6) over the group
    L = [rho] max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    r = theta / prox, rho = prox / mu, and a token with rho > correction_high trains nothing
    every token of the batch weighs the same

prox is the trainer's own policy at the start of the batch, so it takes at least `--training.minibatches 2`: with one
optimiser step r is 1 and its clip never acts, which is refused. `--algo.anchor interpolated` needs neither the extra
steps nor the forward pass (A-3PO, 2512.06547). Leaves out: the paper's critic.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm, Anchor
from asyncrl.losses.corrections import CorrectionName
from asyncrl.registry import register_algo


@register_algo("decoupled_ppo")
class DecoupledPPO(Algorithm):
    """Three policies: clip against the start of the batch, weigh by how stale the data is."""

    anchor: Anchor = "proximal"
    """The policy that the objective's ratio compares with."""
    correction: CorrectionName = "icepop"
    """Detached weight or mask for stale data."""
    clip_low: float | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.2
    """Upper clip of the ratio, at 1 + clip_high."""
    correction_low: float | None = 0.0
    """Lower end of the band; 0: none."""
    correction_high: float | None = 5.0
    """Upper end of the band."""
