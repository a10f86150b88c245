"""The KL penalty that holds the policy near a reference, estimated on sampled tokens.

Called by `pipeline.py` when beta > 0. With d = log ref - log theta (clamped to +-20):

    k1 = -d      k2 = d^2 / 2      k3 = e^d - d - 1 (at most 10)

In the reward k1 is right: its score-function gradient is the gradient of the KL. As a loss, differentiated directly,
k1 has zero expected gradient, k2 the right one while data is on-policy, k3 a biased one. `unbiased` repairs them
off-policy by the ratio w = theta / mu: gradient through both for k1 and k3 (DeepSeek-V3.2), w detached for k2, whose
own derivative already is the right integrand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.losses.sequences import segment_suffix_sum
from asyncrl.losses.tokens import LOG_BOUND, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
K3_MAX = 10.0


def estimate(name: Estimator, logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """The estimator's value per token (T,), with gradient through `logprobs_T`."""
    d_T = (reference_T - logprobs_T).clamp(-LOG_BOUND, LOG_BOUND)
    if name == "k1":
        return -d_T
    if name == "k2":
        return d_T**2 / 2.0
    return (d_T.exp() - d_T - 1.0).clamp(max=K3_MAX)


def penalty(name: Estimator, logprobs_T: Tensor, reference_T: Tensor, behaviour_T: Tensor, *, unbiased: bool) -> Tensor:
    """What is added to the loss per token, times beta."""
    value_T = estimate(name, logprobs_T, reference_T)
    if not unbiased:
        return value_T
    log_w_T = log_ratio(logprobs_T, behaviour_T)
    return (log_w_T.detach() if name == "k2" else log_w_T).exp() * value_T


def reward_to_go(logprobs_T: Tensor, reference_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """k1 in the reward: what each token's advantage loses per beta, the sum of k1 from it to its response's end.

    Detached; (T,). Subtracted from the advantage, it makes the policy gradient that of reward - beta * KL.
    """
    value_T = estimate("k1", logprobs_T.detach(), reference_T)
    return segment_suffix_sum(value_T, sequence_T, num_sequences)
