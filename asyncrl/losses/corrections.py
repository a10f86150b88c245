"""Corrections for stale or mismatched data: a detached weight per token that multiplies the policy loss.

Called by `pipeline.py` when `algo.correction` names one. A weight corrects for what the objective's ratio leaves over:
rho = prox / mu with three policies, w = theta / mu for an objective without ratio. A mask (weights of 0 and 1) may also
reject responses of an objective whose ratio is w already; multiplying such a one again would correct twice and is
refused by `checks.py`. Rejected tokens stay in the denominator of the aggregation.

Each bound can tighten with a token's age: `age_tightening` a turns a bound c into c^(1 / (1 + a * lag)).
At theta = prox = mu every weight is exactly 1; that of `fade`, which reads ages alone, at lag 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from asyncrl.losses.tokens import LOG_BOUND, Tokens

if TYPE_CHECKING:
    from torch import Tensor

CorrectionName = Literal[
    "none", "token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "veto", "opsm", "fade"
]


def token_tis(t: Tokens, *, correction_cap: float = 2.0) -> Tensor:
    """min(rho, cap): truncated importance sampling per token (Yao et al. 2025; AIPO 2505.24034)."""
    return t.log_weight_T.minimum(math.log(correction_cap) * t.tightness_T).exp()


def sequence_tis(t: Tokens, *, correction_cap: float = 5.0) -> Tensor:
    """min(prod rho, cap): the response's whole ratio at each of its tokens."""
    log_rho_B = t.sum_B(t.log_weight_T).clamp(-LOG_BOUND, LOG_BOUND)
    return t.spread(log_rho_B.minimum(math.log(correction_cap) * t.tightness_B).exp())


def icepop(t: Tokens, *, correction_low: float = 0.5, correction_high: float = 5.0) -> Tensor:
    """rho where low <= rho <= high, else 0: tokens whose ratio left the band train nothing (2510.18855)."""
    inside_T = _inside(t.log_weight_T, t.tightness_T, correction_low, correction_high)
    return t.log_weight_T.exp() * inside_T


def sequence_mask(t: Tokens, *, correction_low: float = 0.5, correction_high: float = 2.0) -> Tensor:
    """Rejects a response whose prod rho is outside [low, high]."""
    log_rho_B = t.sum_B(t.log_weight_T)
    return t.spread(_inside(log_rho_B, t.tightness_B, correction_low, correction_high))


def geometric_mask(t: Tokens, *, correction_low: float = 0.99, correction_high: float = 1.01) -> Tensor:
    """Rejects a response whose exp(mean log rho) is outside [low, high].

    A band of .999 to 1.001 is for numerical mismatch alone and rejects nearly all stale data.
    """
    log_rho_B = t.mean_B(t.log_weight_T)
    return t.spread(_inside(log_rho_B, t.tightness_B, correction_low, correction_high))


def veto(t: Tokens, *, correction_low: float = 1e-4, correction_high: float = 100.0) -> Tensor:
    """Rejects a response with any token whose rho is outside [low, high]."""
    outside_T = 1.0 - _inside(t.log_weight_T, t.tightness_T, correction_low, correction_high)
    return t.spread((t.sum_B(outside_T) == 0).to(outside_T.dtype))


def opsm(t: Tokens, *, opsm_divergence: float = 0.5) -> Tensor:
    """Rejects a response with A < 0 and mean log(mu / theta) > divergence (DeepSeek-V3.2, 2512.02556)."""
    drifted_B = t.mean_B(-t.log_stale_T) > opsm_divergence * t.tightness_B
    rejected_T = drifted_B[t.sequence_T] & (t.advantages_T < 0)
    return 1.0 - rejected_T.to(t.log_stale_T.dtype)


def fade(t: Tokens, *, fade_half_life: float = 1.0) -> Tensor:
    """2^(-lag / half_life) where A < 0, 1 elsewhere: stale failures fade, successes may be imitated at any age.

    It goes by age and not by drift, so that it acts before the ratio shows any. Ours: docs/staleness.md.
    """
    kept_T = 0.5 ** (t.lags_T.to(t.log_stale_T.dtype) / fade_half_life)
    return kept_T.where(t.advantages_T < 0, kept_T.new_ones(()))


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (token_tis, sequence_tis, icepop, sequence_mask, geometric_mask, veto, opsm, fade)
}
WEIGHTS = frozenset({"token_tis", "sequence_tis", "icepop"})
"""Corrections that multiply by a ratio; the others only reject."""


def _inside(log_value: Tensor, tightness: Tensor, low: float, high: float) -> Tensor:
    """1 where low^tightness <= exp(log_value) <= high^tightness, else 0."""
    floor = math.log(low) if low > 0 else -math.inf
    above = log_value >= floor * tightness
    return (above & (log_value <= math.log(high) * tightness)).to(log_value.dtype)
