"""Random batches for the tests of the losses, as plain lists and as the `Batch` that a loss sees. Not a test itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from losses_oracle import Choice, Sequence
from torch import Tensor

from asyncrl.algorithm import Algorithm
from asyncrl.config import ReplayConfig, TrainingConfig
from asyncrl.losses import checks
from asyncrl.losses.aggregation import token_weights
from asyncrl.losses.corrections import CORRECTIONS
from asyncrl.losses.objectives import OBJECTIVES
from asyncrl.types import Batch

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
ANCHORS = ("behaviour", "proximal", "interpolated")
MAX_TOKENS = 16


def random_sequences(seed: int, *, num: int = 5, spread: float = 0.4, longest: int = 6) -> list[Sequence]:
    """Responses whose policies differ by about `spread` in log-probability; some tokens alike, lags 0 to 6."""
    rng = np.random.default_rng(seed)

    def one() -> Sequence:
        length = int(rng.integers(1, longest + 1))
        mu = -rng.exponential(1.2, length) - 1e-3
        theta, prox, ref = (np.minimum(mu + spread * rng.standard_normal(length), -1e-6) for _ in range(3))
        alike = rng.random(length) < 0.2
        reward = float(rng.integers(0, 2))
        return Sequence(
            theta=np.where(alike, mu, theta).tolist(),
            mu=mu.tolist(),
            prox=np.where(alike, mu, prox).tolist(),
            ref=ref.tolist(),
            lags=rng.integers(0, 7, length).tolist(),
            advantage=float(rng.choice([-1.3, -0.4, 0.7, 1.9]) if rng.random() < 0.9 else 0.0),
            reward=reward,
        )

    return [one() for _ in range(num)]


def on_policy(sequences: list[Sequence], *, fresh: bool = False) -> list[Sequence]:
    """The same with theta = prox = mu = ref; `fresh`: and with lag 0."""
    return [
        replace(s, mu=s.theta, prox=s.theta, ref=s.theta, lags=[0] * len(s.lags) if fresh else s.lags)
        for s in sequences
    ]


def make_batch(
    sequences: list[Sequence],
    aggregation: str,
    *,
    weights_B: np.ndarray | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Batch]:
    """(log theta as a leaf that wants a gradient, the batch), float64 unless told otherwise."""
    dtype = dtype or torch.float64
    lengths = np.array([len(s.theta) for s in sequences], dtype=np.int64)
    if weights_B is None:
        weights_B = token_weights(aggregation, lengths, MAX_TOKENS)

    def tokens(name: str, kind: torch.dtype = dtype) -> Tensor:
        return torch.tensor([v for s in sequences for v in getattr(s, name)], dtype=kind)

    def repeated(values: list[float] | np.ndarray) -> Tensor:
        return torch.tensor(np.repeat(np.asarray(values, dtype=np.float64), lengths), dtype=dtype)

    batch = Batch(
        behaviour_T=tokens("mu"),
        proximal_T=tokens("prox"),
        reference_T=tokens("ref"),
        advantages_T=repeated([s.advantage for s in sequences]),
        rewards_T=repeated([s.reward for s in sequences]),
        lags_T=tokens("lags", torch.int64),
        sequence_T=torch.tensor(np.repeat(np.arange(len(sequences)), lengths), dtype=torch.int64),
        num_sequences=len(sequences),
        weights_T=repeated(weights_B),
    )
    return tokens("theta").requires_grad_(), batch


def loss_and_gradient(algo: Algorithm, logprobs_T: Tensor, batch: Batch) -> tuple[float, Tensor]:
    """What the engine computes for one micro-batch that is the whole batch."""
    if algo.needs().statistics:
        with torch.no_grad():
            batch.statistics = algo.statistics(logprobs_T, batch)
    loss_T, metrics = algo.loss(logprobs_T, batch)
    assert loss_T.shape == logprobs_T.shape
    assert all(m.shape == logprobs_T.shape and not m.requires_grad for m in metrics.values())
    total = (loss_T * batch.weights_T).sum()
    total.backward()
    assert logprobs_T.grad is not None
    return total.item(), logprobs_T.grad


def allowed(*, target_lag: int = 2) -> Iterator[tuple[str, str, str]]:
    """Every (objective, correction, anchor) that a run accepts."""
    for objective, correction, anchor in product(OBJECTIVES, ["none", *CORRECTIONS], ANCHORS):
        algo = Algorithm(objective=objective, correction=correction, anchor=anchor)
        training, replay = TrainingConfig(minibatches=2), ReplayConfig(target_lag=target_lag)
        if not list(checks.problems(algo, training=training, replay=replay)):
            yield objective, correction, anchor


def algorithm_of(choice: Choice) -> Algorithm:
    """The algorithm whose keys say what `choice` says."""
    return Algorithm(
        objective=choice.objective,
        correction=choice.correction,
        anchor=choice.anchor,
        aggregation=choice.aggregation,
        age_tightening=choice.age_tightening,
        self_normalise=choice.self_normalise,
        beta=choice.beta,
        kl=choice.kl if choice.beta else None,
        kl_in=choice.kl_in,
        kl_unbiased=choice.kl_unbiased,
        **choice.bounds,
    )
