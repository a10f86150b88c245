"""Diagnostics against plain loops: ratios, effective sample size and mismatch, in total and by lag, however cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_helpers import make_batch, on_policy, random_sequences

from asyncrl.losses import diagnostics

torch.set_num_threads(1)


def oracle(sequences, *, lag: int | None = None) -> dict[str, float]:
    """Means over the tokens (of one lag, or all), and over responses by their oldest token."""
    tokens = [
        (min(max(p - q, -20), 20), q)
        for s in sequences
        for p, q, own in zip(s.theta, s.mu, s.lags, strict=True)
        if lag in (None, own)
    ]
    w = [math.exp(d) for d, _ in tokens]
    whole = [
        math.exp(min(max(sum(min(max(p - q, -20), 20) for p, q in zip(s.theta, s.mu, strict=True)), -20), 20))
        for s in sequences
        if lag in (None, max(s.lags))
    ]
    n = len(tokens)
    return {
        "ratio/mean": sum(w) / n,
        "ratio/ess": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "ratio/ess_sequence": sum(whole) ** 2 / (len(whole) * sum(x * x for x in whole)) if whole else 1.0,
        "mismatch/k1": sum(-d for d, _ in tokens) / n,
        "mismatch/k3": sum(math.exp(d) - 1 - d for d, _ in tokens) / n,
        "mismatch/abs_diff": sum(abs(math.exp(d + q) - math.exp(q)) for d, q in tokens) / n,
    }


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 0.5, 3.0, 30.0]), cut=st.integers(0, 8))
def test_diagnostics_equal_the_loops_in_total_and_by_lag_however_cut(seed, spread, cut):
    sequences = random_sequences(seed, num=8, spread=spread)
    totals: dict[str, torch.Tensor] = {}
    for part in (sequences[:cut], sequences[cut:]):
        for name, value in diagnostics.sums(*make_batch(part, "token_mean")).items():
            totals[name] = totals.get(name, 0) + value
    row = diagnostics.report(totals)
    for name, value in oracle(sequences).items():
        assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    lags = sorted({lag for s in sequences for lag in s.lags})
    assert [k for k in range(64) if f"tokens_by_lag/{k}" in row] == lags
    assert sum(row[f"tokens_by_lag/{k}"] for k in lags) == sum(len(s.mu) for s in sequences)
    for lag in lags:
        for name, value in oracle(sequences, lag=lag).items():
            assert row[f"{name}_by_lag/{lag}"] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_fresh_data_reads_one_and_zero():
    row = diagnostics.report(diagnostics.sums(*make_batch(on_policy(random_sequences(0)), "token_mean")))
    assert row["ratio/ess"] == row["ratio/ess_sequence"] == row["ratio/mean"] == 1.0
    assert row["mismatch/k3"] == row["mismatch/k1"] == row["mismatch/abs_diff"] == row["ratio/bounded"] == 0.0


def test_effective_sample_size_sees_the_outlier_that_a_cap_would_hide():
    sequences = random_sequences(0, num=10, spread=0.0)
    sequences[0].theta[0] = sequences[0].mu[0] + 9
    assert diagnostics.report(diagnostics.sums(*make_batch(sequences, "token_mean")))["ratio/ess"] < 0.1


def test_ages_beyond_the_last_bin_share_it():
    sequences = random_sequences(0, num=1)
    sequences[0].lags = [1000] * len(sequences[0].lags)
    row = diagnostics.report(diagnostics.sums(*make_batch(sequences, "token_mean")))
    assert row["tokens_by_lag/63"] == len(sequences[0].lags)
