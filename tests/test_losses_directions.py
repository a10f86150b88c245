"""Which way every bound acts: loosening one never removes a token, and never touches tokens of the other sign."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_helpers import make_batch, random_sequences

from asyncrl.algorithm import Algorithm
from asyncrl.losses import pipeline

torch.set_num_threads(1)
SEEDS = st.integers(0, 10**6)


def pulls(seed: int, *, spread: float = 1.0, **keys) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient per token relative to REINFORCE's -A, advantages); nan where A is 0."""
    logprobs_T, batch = make_batch(random_sequences(seed, num=12, spread=spread), "token_mean")
    algo = Algorithm(**keys)
    if algo.needs().statistics:
        batch.statistics = algo.statistics(logprobs_T.detach(), batch)
    algo.loss(logprobs_T, batch)[0].sum().backward()
    return logprobs_T.grad / -batch.advantages_T, batch.advantages_T


LOOSER = [
    ("ppo_clip", "clip_high", 0.1, 0.5, 1),
    ("ppo_clip", "clip_low", 0.1, 0.5, -1),
    ("ppo_clip", "dual_clip", 1.5, 4.0, -1),
    ("gspo", "clip_high", 0.01, 0.3, 1),
    ("gspo", "clip_low", 0.01, 0.3, -1),
    ("cispo", "weight_max", 1.5, 4.0, 0),
    ("dppo_tv", "weight_max", 1.5, 4.0, 0),
    ("dppo_tv", "divergence", 0.02, 0.2, 0),
    ("m2po", "moment_budget", 0.01, 0.3, 0),
    ("m2po", "clip_high", 0.1, 0.9, 1),
    ("m2po", "clip_low", 0.1, 0.6, -1),
]
"""Objective, bound, tight, loose, and the sign of A that it acts on (0: both)."""


@pytest.mark.parametrize(("objective", "key", "tight", "loose", "sign"), LOOSER)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_a_looser_bound_lets_more_through_on_its_side_alone(objective, key, tight, loose, sign, seed):
    tight_T, advantages_T = pulls(seed, objective=objective, **{key: tight})
    loose_T, _ = pulls(seed, objective=objective, **{key: loose})
    some_T = advantages_T != 0
    assert (loose_T[some_T] >= tight_T[some_T]).all()
    if sign:
        other_T = advantages_T * sign < 0
        assert torch.equal(loose_T[other_T], tight_T[other_T])


@pytest.mark.parametrize(("objective", "key", "tight", "loose", "sign"), LOOSER)
def test_every_bound_acts_somewhere(objective, key, tight, loose, sign):
    assert any(
        not torch.equal(
            pulls(s, objective=objective, **{key: tight})[0].nan_to_num(),
            pulls(s, objective=objective, **{key: loose})[0].nan_to_num(),
        )
        for s in range(20)
    )


LOOSER_CORRECTIONS = [
    ("token_tis", "correction_cap", 1.2, 3.0),
    ("sequence_tis", "correction_cap", 1.2, 3.0),
    ("icepop", "correction_high", 1.2, 3.0),
    ("icepop", "correction_low", 0.9, 0.3),
    ("sequence_mask", "correction_high", 1.2, 3.0),
    ("sequence_mask", "correction_low", 0.9, 0.3),
    ("geometric_mask", "correction_high", 1.2, 3.0),
    ("geometric_mask", "correction_low", 0.9, 0.3),
    ("veto", "correction_high", 1.2, 3.0),
    ("veto", "correction_low", 0.9, 0.3),
    ("opsm", "opsm_divergence", 0.05, 0.5),
    ("fade", "fade_half_life", 0.5, 4.0),
]


@pytest.mark.parametrize(("correction", "key", "tight", "loose"), LOOSER_CORRECTIONS)
def test_a_looser_correction_only_lets_more_through(correction, key, tight, loose):
    acted = False
    for seed in range(20):
        tight_T, _ = pulls(seed, objective="reinforce", correction=correction, **{key: tight})
        loose_T, _ = pulls(seed, objective="reinforce", correction=correction, **{key: loose})
        assert (loose_T.nan_to_num() >= tight_T.nan_to_num()).all()
        acted |= not torch.equal(loose_T.nan_to_num(), tight_T.nan_to_num())
    assert acted


@pytest.mark.parametrize("correction", sorted({c for c, *_ in LOOSER_CORRECTIONS} - {"fade"}))
def test_age_tightens_bounds_of_old_tokens_and_leaves_fresh_ones(correction):
    for fresh in (True, False):
        spread = 0.01 if correction == "geometric_mask" else 0.6
        sequences = random_sequences(4, num=40, spread=spread)
        for sequence in sequences:
            sequence.lags = [0 if fresh else 30] * len(sequence.lags)
        logprobs_T, batch = make_batch(sequences, "token_mean")
        plain, aged = (Algorithm(objective="reinforce", correction=correction, age_tightening=a) for a in (0.0, 0.2))
        plain_T, aged_T = (pipeline.correction(x, pipeline.make_tokens(x, logprobs_T, batch)) for x in (plain, aged))
        assert (aged_T <= plain_T).all()
        assert torch.equal(aged_T, plain_T) == fresh


CLIPPING = [("ppo_clip", {}), ("gspo", {}), ("m2po", {"clip_low": 0.0, "clip_high": 0.0}), ("dppo_tv", {})]


@pytest.mark.parametrize(("objective", "keys"), CLIPPING)
def test_stale_data_makes_clip_fractions_positive_and_fresh_data_does_not(objective, keys):
    algo = Algorithm(objective=objective, **keys)
    for spread in (0.0, 1.5):
        logprobs_T, batch = make_batch(random_sequences(1, num=200, spread=spread), "token_mean")
        if algo.needs().statistics:
            batch.statistics = algo.statistics(logprobs_T.detach(), batch)
        _, metrics = algo.loss(logprobs_T, batch)
        fractions = [float(metrics[name].mean()) for name in ("clip/high", "clip/low")]
        assert all(f > 0 for f in fractions) == (spread > 0)
        assert all(f == 0 for f in fractions) == (spread == 0)


def test_clip_fractions_count_only_the_side_that_clips():
    """A rise is clipped where A > 0, a fall where A < 0, whatever the other tokens did."""
    sequences = random_sequences(0, num=4, spread=0.0)
    for sequence, (gap, advantage) in zip(sequences, [(1, 1), (1, -1), (-1, 1), (-1, -1)], strict=True):
        sequence.theta = [v + gap for v in sequence.mu]
        sequence.advantage = float(advantage)
    logprobs_T, batch = make_batch(sequences, "token_mean")
    _, metrics = Algorithm().loss(logprobs_T, batch)
    assert sorted(set(batch.sequence_T[metrics["clip/high"] > 0].tolist())) == [0]
    assert sorted(set(batch.sequence_T[metrics["clip/low"] > 0].tolist())) == [3]
    assert np.isfinite(float(metrics["clip/dual"].sum()))
