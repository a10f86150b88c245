"""An algorithm of your own: one file with one class.

    asyncrl train --import examples/my_algo.py --algo my_algo
    asyncrl train --import examples/my_algo.py --algo my_algo --algo.failure-weight 0.2
    asyncrl algos my_algo --import examples/my_algo.py

Two stages differ from the others' and everything else (sampling, staleness, weighting, corrections, KL, metrics) stays:

    A = R - median of the group          only what the majority did not manage is news
    L = -A logp                          where A > 0
    L = -[failure_weight * min(w, 1)] A logp      where A < 0: w = theta / mu, [.] stops the gradient

This docstring is what `asyncrl algos my_algo` prints, the fields are the keys, and the text under each is its help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncrl import Algorithm, register_algo

if TYPE_CHECKING:  # `asyncrl algos` never needs torch, so neither does this file
    from asyncrl.losses.tokens import Loss, Tokens


@register_algo("my_algo")
class MyAlgo(Algorithm):
    """Median baseline; failures count less, and less again once the policy has moved away from them."""

    failure_weight: float = 0.5
    """What a failure counts compared with a success."""

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """Float64 (P, G) -> the same shape; must be finite."""
        return rewards_PG - np.median(rewards_PG, axis=1, keepdims=True)

    def surrogate(self, tokens: Tokens) -> Loss:
        """Loss per token (T,) without any reduction, and what to log, per token too."""
        weight_T = self.failure_weight * tokens.log_ratio_T.detach().clamp(max=0.0).exp()
        weight_T = weight_T.where(tokens.advantages_T < 0, weight_T.new_ones(()))
        return -weight_T * tokens.advantages_T * tokens.logprobs_T, {"failures/weight": weight_T}
