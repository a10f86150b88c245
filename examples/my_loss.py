"""A loss of your own as an `nn.Module`: padded tensors in, one scalar out.

    asyncrl train --algo examples/my_loss.py:CappedRatioLoss
    asyncrl train --algo examples/my_loss.py:CappedRatioLoss --algo.cap 1.5

The parameters of `__init__` become the algorithm's keys. `ref_logprobs` are those of the policy that sampled, or of the
reference model when the module has a `beta` above 0. A module reduces by itself, so the engine cannot weigh its tokens
over the whole batch: say with `aggregation` which mean it returns, and keep to a plain one, or the result depends on
how the batch was cut into micro-batches.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from asyncrl.losses.modules import masked_mean


class CappedRatioLoss(nn.Module):
    """-A min(theta / mu, cap): no gradient from a token that became `cap` times as likely."""

    aggregation = "token_mean"

    def __init__(self, cap: float = 2.0) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        """logprobs, ref_logprobs, advantages and padding_mask (1 for real tokens), all (B, L)."""
        ratio = (logprobs - ref_logprobs).clamp(max=math.log(self.cap)).exp()
        return masked_mean(-ratio * advantages, padding_mask)
