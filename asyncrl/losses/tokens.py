"""What the stages of a loss see: the trained tokens with the ratios that the chosen anchor gives.

Made by `pipeline.py` for each micro-batch, read by objectives, corrections and KL penalties, changed by nobody. Every
log-ratio is clamped to +-20 before anything takes its `exp`, so that no weight is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.losses.sequences import segment_mean, segment_min, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

LOG_BOUND = 20.0
"""|log-ratio| is clamped to this before exp: e^20 = 4.9e8, far beyond any useful weight and finite in fp32 squared."""

Metrics = dict[str, "Tensor"]
Loss = tuple["Tensor", Metrics]
"""Loss per token (T,) and metrics per token, (T,) each, detached."""


def log_ratio(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """log of the probability ratio, clamped to +-20."""
    return (logprobs_T - other_T).clamp(-LOG_BOUND, LOG_BOUND)


@dataclass(slots=True, kw_only=True)
class Tokens:
    """The trained tokens of one micro-batch as an objective sees them; shapes (T,) unless the name says otherwise."""

    logprobs_T: Tensor
    """log theta, with gradient."""
    anchor_T: Tensor
    """log of the anchor policy: mu, prox, or between; no gradient."""
    log_ratio_T: Tensor
    """log x = log theta - log anchor, clamped, with gradient."""
    log_stale_T: Tensor
    """log w = log theta - log mu, clamped, no gradient."""
    log_weight_T: Tensor
    """What a correction corrects for, clamped, no gradient: log rho = log prox / mu with three policies, else log w."""
    advantages_T: Tensor
    rewards_T: Tensor
    lags_T: Tensor
    sequence_T: Tensor
    num_sequences: int
    statistics: dict[str, Tensor]
    age_tightening: float = 0.0
    """Bounds shrink by 1 / (1 + age_tightening * lag) in log space."""

    @property
    def tightness_T(self) -> Tensor:
        """The factor in (0, 1] on log-bounds for each token's age."""
        return 1.0 / (1.0 + self.age_tightening * self.lags_T.to(self.log_stale_T.dtype))

    @property
    def tightness_B(self) -> Tensor:
        """The factor of each response: that of its oldest token."""
        return segment_min(self.tightness_T, self.sequence_T, self.num_sequences)

    def sum_B(self, values_T: Tensor) -> Tensor:
        """Sum over each response."""
        return segment_sum(values_T, self.sequence_T, self.num_sequences)

    def mean_B(self, values_T: Tensor) -> Tensor:
        """Mean over each response."""
        return segment_mean(values_T, self.sequence_T, self.num_sequences)

    def spread(self, values_B: Tensor) -> Tensor:
        """(B,) -> (T,): each response's value at each of its tokens."""
        return values_B[self.sequence_T]
