"""What an algorithm is: hyperparameters, advantages, which groups to keep, and a loss per token.

An algorithm is one file in `algos/` (or anywhere a user likes) with one class. Its fields are the `algo` section of the
configuration and the `--help` text. It never mentions a process, a rank or a micro-batch: the engine weights its
per-token values over the whole global batch and sums them. No torch import at module level here or in `algos/`: tensors
are used through their methods, so that `asyncrl algos` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from asyncrl.types import Batch, Episode

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine must compute before this algorithm's loss; each costs something, so the default is nothing."""

    proximal: bool = False
    """A forward pass at the start of each batch: fills `Batch.proximal_T`."""
    reference: bool = False
    """A reference model: fills `Batch.reference_T`."""
    entropy: bool = False
    """The exact entropy, differentiable: fills `Batch.entropy_T`."""
    statistics: bool = False
    """`statistics()` over the whole batch before the first loss: needs the forward pass too."""


class Algorithm(msgspec.Struct, kw_only=True):
    """Keys that every algorithm has. Subclass once, add fields, override what differs."""

    n_samples: int = 8
    """Responses per prompt: the group size G."""
    temperature: float = 1.0
    """Sampling temperature; losses and log-probabilities are those of the tempered distribution."""
    aggregation: Aggregation = "token_mean"
    """How tokens are weighted over the optimiser step's whole batch."""

    def needs(self) -> Needs:
        """What the engine must compute for this loss."""
        return Needs()

    def reward(self, episode: Episode, max_tokens: int) -> float:
        """The reward that is trained on: the environment's, unless the algorithm shapes it (overlong penalty)."""
        return episode.reward

    def trains(self, episode: Episode) -> bool:
        """False: the response counts for its group's baseline and trains nothing (overlong mask)."""
        return True

    def keep(self, rewards_G: np.ndarray) -> bool:
        """False: drop the group before it is sent, reason `filtered` (dynamic sampling)."""
        return True

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """Rewards of a whole batch, float64 (P, G) -> advantages of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages(rewards_PG)")

    def statistics(self, logprobs_T: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over tokens or sequences which the engine adds up over the whole global batch, if `needs().statistics`.

        Returns scalars or 1-d histograms; they are summed over micro-batches and ranks, and the loss finds them in
        `batch.statistics`. Called without gradient, with the log-probabilities of the start of the batch.
        """
        return {}

    def loss(self, logprobs_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probabilities of the current policy, fp32 (T,) -> (loss per token (T,), metrics per token (T,) each).

        No reduction: the engine computes `(loss_T * batch.weights_T).sum()` and averages each metric over all trained
        tokens of the global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(logprobs_T, batch)")
