"""Sampling one token per row from logits: counter-based random numbers and inverse CDF.

The local engine calls it once per step. It keeps no state: the number drawn for a token depends on the request's seed
and the token's index alone, so what a request samples does not depend on when it runs or what runs beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds_R: np.ndarray, indices_R: np.ndarray) -> np.ndarray:
    """Draw number `indices_R` of the streams `seeds_R`: float64 (R,) in [0, 1). SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds_R.astype(np.uint64)) + (indices_R.astype(np.uint64) + np.uint64(1)) * GAMMA
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 (R,) and their log-probabilities float32 (R,) under the distribution sampled from.

    `temperature_R` is float32, `uniform_R` float64. Temperature 0 takes the most likely token; its log-probability is
    that of temperature 1, because the greedy distribution itself would say 0 for every token.
    """
    logits_RV = logits_RV.float()
    greedy_R = temperature_R == 0
    scale_R = torch.where(greedy_R, 1.0, temperature_R)
    logprobs_RV = (logits_RV / scale_R[:, None]).log_softmax(-1)
    tokens_R = torch.where(greedy_R, logits_RV.argmax(-1), _inverse_cdf(logprobs_RV, uniform_R))
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def _inverse_cdf(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    cdf_RV = logprobs_RV.double().exp().cumsum(-1)
    total_R = cdf_RV[:, -1]
    # Strictly below the total, so that rounding can never point past the last token that has any probability.
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    return torch.searchsorted(cdf_RV, target_R[:, None], right=True)[:, 0].clamp(max=cdf_RV.shape[1] - 1)
