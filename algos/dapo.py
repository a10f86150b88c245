"""DAPO (2503.14476): GRPO for long responses, with four repairs.

    A = (R - mean) / (std + 1e-6) over the group           groups of equal rewards are dropped and replaced
    L = max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high))  x = theta / mu; for A < 0 at most -dual_clip A
    every token of the batch weighs the same; no KL
    R loses up to 1 over the last `overlong_buffer` tokens before the limit

Leaves out: the paper's curriculum of mini-batches (its ratio is to the weights at the start of the batch: that is
`--algo.anchor proximal`); the overlong penalty is off until `overlong_buffer` says how many tokens it covers.
"""

from __future__ import annotations

from asyncrl.algorithm import Algorithm
from asyncrl.registry import register_algo


@register_algo("dapo")
class DAPO(Algorithm):
    """Clip-higher, dynamic sampling, token mean, overlong penalty."""

    clip_low: float | None = 0.2
    """Lower clip of the ratio, at 1 - clip_low."""
    clip_high: float | None = 0.28
    """Upper clip of the ratio, at 1 + clip_high: room for rare tokens to grow."""
    dynamic_sampling: bool = True
    """Drop groups whose rewards are all equal before they are sent, and generate others."""
