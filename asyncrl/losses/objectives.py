"""The policy objectives: a loss per token from the ratio x = theta / anchor, the advantage A and the log-probability.

Each is a function of `Tokens` and of its own hyperparameters; their names are the algorithm's keys, their defaults the
objective's defaults. `pipeline.py` calls the one that `algo.objective` names. `[.]` below stops the gradient. None
reduces over tokens, reads a config or knows about staleness beyond the ratio it is given.

At theta = anchor each one but `delightful` has exactly the REINFORCE gradient, -A * grad logp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from asyncrl.losses import second_moment
from asyncrl.losses.tokens import LOG_BOUND, Loss, Metrics, Tokens

if TYPE_CHECKING:
    from torch import Tensor

ObjectiveName = Literal[
    "reinforce", "ppo_clip", "cispo", "gspo", "sapo", "dppo_tv", "m2po", "topr", "vespo", "delightful"
]


def reinforce(t: Tokens) -> Loss:
    """L = -A logp (Williams 1992). Uses no ratio: off-policy it needs a correction."""
    return -t.advantages_T * t.logprobs_T, {}


def ppo_clip(t: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0) -> Loss:
    """L = max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)), and for A < 0 at most -dual_clip A (0: no such bound).

    Sources: PPO 1707.06347; separate bounds DAPO 2503.14476; dual clip 1912.09729.
    """
    return _clipped(t.log_ratio_T.exp(), t.advantages_T, 1.0 - clip_low, 1.0 + clip_high, dual_clip)


def cispo(t: Tokens, *, weight_max: float = 5.0) -> Loss:
    """L = -[min(x, weight_max)] A logp: every token keeps its gradient, none weighs more than the cap.

    Sources: MiniMax-M1 2506.13585, ScaleRL 2510.13786. The cap is absolute; other code writes it as 1 + epsilon.
    """
    return _weighted(t, t.log_ratio_T.detach().exp().clamp(max=weight_max), capped_above=math.log(weight_max))


def gspo(t: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """ppo_clip on the response's ratio s = exp(mean log x), per token [s] theta / [theta] (2507.18071, eq. 7, 14)."""
    log_s_T = t.spread(t.mean_B(t.log_ratio_T.detach()))
    x_T = (t.logprobs_T - t.logprobs_T.detach() + log_s_T).exp()
    return _clipped(x_T, t.advantages_T, 1.0 - clip_low, 1.0 + clip_high, 0.0)


def sapo(t: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Loss:
    """L = -(4 / tau) sigmoid(tau (x - 1)) A, tau by the sign of A: a smooth gate instead of a clip (2511.20347)."""
    tau_T = (t.advantages_T > 0).to(t.log_ratio_T.dtype) * (tau_positive - tau_negative) + tau_negative
    gate_T = (tau_T * (t.log_ratio_T.exp() - 1.0)).sigmoid()
    return -(4.0 / tau_T) * gate_T * t.advantages_T, {"gate/mean": 4.0 * _slope(gate_T.detach())}


def dppo_tv(t: Tokens, *, divergence: float = 0.2, weight_max: float = 20.0) -> Loss:
    """L = -[min(x, weight_max)] A logp, masked where the *probability* moved by more than `divergence` along A.

    Masked: A > 0 and p - q > divergence, or A <= 0 and p - q < -divergence, with p of theta and q of the anchor
    (2602.04879): a rare token may change its ratio a lot, a likely one may not change its probability a lot.
    """
    moved_T = t.logprobs_T.detach().exp() - t.anchor_T.exp()
    up_T = (t.advantages_T > 0) & (moved_T > divergence)
    down_T = (t.advantages_T <= 0) & (moved_T < -divergence)
    weight_T = t.log_ratio_T.detach().exp().clamp(max=weight_max)
    loss_T, metrics = _weighted(t, weight_T.masked_fill(up_T | down_T, 0.0), capped_above=math.log(weight_max))
    return loss_T, metrics | {"clip/high": _float(up_T, t), "clip/low": _float(down_T, t)}


def m2po(t: Tokens, *, moment_budget: float = 0.04, clip_low: float = 0.3, clip_high: float = 0.5) -> Loss:
    """ppo_clip on x in [e^-tau, e^tau], tau from the second moment of log x over the whole batch (2510.01161).

    tau is the largest value with sum min(D^2, tau^2) <= moment_budget * H over the H tokens where a clip could act
    (A > 0, x > 1 or A < 0, x < 1), D = log x; the range is never tighter than [1 - clip_low, 1 + clip_high].
    """
    tau = second_moment.threshold(t.statistics, moment_budget)
    low = tau.neg().exp().clamp(max=1.0 - clip_low)
    high = tau.exp().clamp(min=1.0 + clip_high)
    return _clipped(t.log_ratio_T.exp(), t.advantages_T, low, high, 0.0)


def topr(t: Tokens, *, topr_level: Literal["token", "sequence"] = "sequence") -> Loss:
    """A >= 0: L = -A logp; A < 0: L = -[min(W, 1)] A logp, W the ratio of the response (2503.14286)."""
    log_w_T = t.log_ratio_T.detach()
    if topr_level == "sequence":
        log_w_T = t.spread(t.sum_B(log_w_T)).clamp(-LOG_BOUND, LOG_BOUND)
    tapered_T = log_w_T.clamp(max=0.0).exp()
    return _weighted(t, tapered_T.where(t.advantages_T < 0, tapered_T.new_ones(())))


def vespo(
    t: Tokens,
    *,
    vespo_k_positive: float = 2.0,
    vespo_k_negative: float = 3.0,
    vespo_lambda_positive: float = 3.0,
    vespo_lambda_negative: float = 2.0,
) -> Loss:
    """L = -[W^k e^(lambda (1 - W))] A logp, W the ratio of the response, k and lambda by the sign of A (2602.10693)."""
    log_w_T = t.spread(t.sum_B(t.log_ratio_T.detach())).clamp(-LOG_BOUND, LOG_BOUND)
    positive_T = t.advantages_T > 0
    up_T = vespo_k_positive * log_w_T + vespo_lambda_positive * (1.0 - log_w_T.exp())
    down_T = vespo_k_negative * log_w_T + vespo_lambda_negative * (1.0 - log_w_T.exp())
    return _weighted(t, up_T.where(positive_T, down_T).exp())


def delightful(t: Tokens, *, eta: float = 1.0) -> Loss:
    """L = -[sigmoid(A * -logp / eta)] A logp: surprise that paid off counts most; needs no mu (2603.14608)."""
    return _weighted(t, (t.advantages_T * -t.logprobs_T.detach() / eta).sigmoid())


OBJECTIVES: dict[str, Callable[..., Loss]] = {
    f.__name__: f for f in (reinforce, ppo_clip, cispo, gspo, sapo, dppo_tv, m2po, topr, vespo, delightful)
}
WITHOUT_RATIO = frozenset({"reinforce", "delightful"})
"""Objectives that use no anchor: a correction then corrects for w = theta / mu."""
UNCORRECTED = frozenset({"reinforce"})
"""Objectives that by themselves do nothing about staleness."""


def _clipped(x_T: Tensor, advantages_T: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: float) -> Loss:
    plain_T = -advantages_T * x_T
    bounded_T = -advantages_T * x_T.clamp(low, high)  # type: ignore[arg-type]  # two numbers or two scalar tensors
    loss_T = plain_T.maximum(bounded_T)
    negative_T = advantages_T < 0
    metrics: Metrics = {
        "clip/high": ((advantages_T > 0) & (x_T > high)).to(x_T.dtype),
        "clip/low": (negative_T & (x_T < low)).to(x_T.dtype),
    }
    if dual_clip:
        ceiling_T = -dual_clip * advantages_T
        metrics["clip/dual"] = (negative_T & (loss_T > ceiling_T)).to(x_T.dtype).detach()
        loss_T = loss_T.minimum(ceiling_T).where(negative_T, loss_T)
    return loss_T, metrics


def _weighted(t: Tokens, weight_T: Tensor, *, capped_above: float | None = None) -> Loss:
    """-[weight] A logp; `weight_T` carries no gradient."""
    metrics: Metrics = {"weight/mean": weight_T}
    if capped_above is not None:
        metrics["clip/high"] = (t.log_ratio_T.detach() > capped_above).to(weight_T.dtype)
    return -weight_T * t.advantages_T * t.logprobs_T, metrics


def _slope(gate_T: Tensor) -> Tensor:
    return gate_T * (1.0 - gate_T)


def _float(mask_T: Tensor, t: Tokens) -> Tensor:
    return mask_T.to(t.log_ratio_T.dtype)
