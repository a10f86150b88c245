"""How far the data is from the policy: ratios, effective sample size and mismatch, in total and by age.

Called by the trainer for each micro-batch under `no_grad`. `sums` returns plain sums, which the engine adds up over
micro-batches and ranks; `report` turns the totals into the names that are logged. Everything is on raw weights
w = theta / mu, never on clamped ones: an ESS of truncated weights reads 1 in a collapsed run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.losses.sequences import segment_min, segment_sum
from asyncrl.losses.tokens import LOG_BOUND, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.types import Batch

NUM_LAGS = 64
"""Ages 0 .. 62 have a bin each; the last holds everything older."""


def sums(logprobs_T: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sums by lag, each (NUM_LAGS,) float64: of tokens, and of responses by their oldest token."""
    log_w_T = log_ratio(logprobs_T.detach(), batch.behaviour_T).double()
    w_T = log_w_T.exp()
    per_token = {
        "tokens": w_T.new_ones(w_T.shape),
        "w": w_T,
        "w2": w_T**2,
        "k1": -log_w_T,
        "k3": w_T - 1.0 - log_w_T,
        "abs": (w_T * batch.behaviour_T.double().exp() - batch.behaviour_T.double().exp()).abs(),
        "bounded": (log_w_T.abs() >= LOG_BOUND).double(),
    }
    bins_T = batch.lags_T.clamp(0, NUM_LAGS - 1)
    w_B = segment_sum(log_w_T, batch.sequence_T, batch.num_sequences).clamp(-LOG_BOUND, LOG_BOUND).exp()
    freshness_B = segment_min(-batch.lags_T.double(), batch.sequence_T, batch.num_sequences)
    full_B = freshness_B.isfinite()
    bins_B = (-freshness_B[full_B]).long().clamp(0, NUM_LAGS - 1)
    per_sequence = {"sequences": w_B.new_ones(w_B.shape), "sequence_w": w_B, "sequence_w2": w_B**2}
    return {name: by_lag(value, bins_T) for name, value in per_token.items()} | {
        name: by_lag(value[full_B], bins_B) for name, value in per_sequence.items()
    }


def by_lag(values: Tensor, bins: Tensor) -> Tensor:
    """Sum of the values in each lag's bin, (NUM_LAGS,) float64; for the metrics that a loss returns, too."""
    return values.double().new_zeros(NUM_LAGS).index_add(0, bins.clamp(0, NUM_LAGS - 1), values.double())


def report(totals: dict[str, Tensor]) -> dict[str, float]:
    """Totals over the global batch -> metrics; a name ending in `_by_lag/k` is that of the tokens of lag k."""
    named = _ratios({name: float(value.sum()) for name, value in totals.items()})
    for lag in totals["tokens"].nonzero().flatten().tolist():
        at_lag = _ratios({name: float(value[lag]) for name, value in totals.items()})
        named |= {f"{name}_by_lag/{lag}": value for name, value in at_lag.items()}
        named[f"tokens_by_lag/{lag}"] = float(totals["tokens"][lag])
    return named


def ess(total: float, total_square: float, count: float) -> float:
    """Effective sample size as a share, (sum w)^2 / (n sum w^2), in (0, 1]; 1 for no data."""
    return total**2 / (count * total_square) if count and total_square else 1.0


def _ratios(s: dict[str, float]) -> dict[str, float]:
    tokens = max(s["tokens"], 1.0)
    return {
        "ratio/mean": s["w"] / tokens,
        "ratio/ess": ess(s["w"], s["w2"], s["tokens"]),
        "ratio/ess_sequence": ess(s["sequence_w"], s["sequence_w2"], s["sequences"]),
        "ratio/bounded": s["bounded"] / tokens,
        "mismatch/k1": s["k1"] / tokens,
        "mismatch/k3": s["k3"] / tokens,
        "mismatch/abs_diff": s["abs"] / tokens,
    }
