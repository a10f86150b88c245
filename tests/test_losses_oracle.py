"""Every allowed combination of stages equals the naive loops of losses_oracle.py: the loss and its gradient."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_helpers import AGGREGATIONS, algorithm_of, allowed, loss_and_gradient, make_batch, random_sequences
from losses_oracle import Choice, second_moment_threshold, total

from asyncrl.losses import second_moment
from asyncrl.losses.corrections import WEIGHTS

torch.set_num_threads(1)
COMBINATIONS = sorted(set(allowed(target_lag=2)) | set(allowed(target_lag=0)))
SPREADS = st.sampled_from([0.01, 0.3, 1.0, 5.0, 30.0])
"""How far apart the policies are: from numerical noise to beyond the clamp of log-ratios at 20."""


def agree(choice: Choice, sequences) -> None:
    algo = algorithm_of(choice)
    logprobs_T, batch = make_batch(sequences, choice.aggregation)
    if choice.objective == "m2po":  # the histogram's own threshold, which has a test of its own below
        found = second_moment.threshold(algo.statistics(logprobs_T.detach(), batch), 0.04)
        choice = replace(choice, tau=float(found))
    loss, gradient_T = loss_and_gradient(algo, logprobs_T, batch)
    expected, gradients = total(choice, sequences)
    wanted_T = torch.tensor([g for s in gradients for g in s], dtype=torch.float64)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12), choice
    torch.testing.assert_close(gradient_T, wanted_T, rtol=1e-9, atol=1e-12, msg=lambda m: f"{choice}\n{m}")


def test_there_are_combinations_to_test():
    assert len(COMBINATIONS) > 120
    assert {o for o, _, _ in COMBINATIONS} >= {"ppo_clip", "vespo", "delightful"}


@pytest.mark.parametrize(("objective", "correction", "anchor"), COMBINATIONS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), spread=SPREADS, tightening=st.sampled_from([0.0, 0.3]), normalise=st.booleans())
def test_stages_equal_the_loops(objective, correction, anchor, seed, spread, tightening, normalise):
    sequences = random_sequences(seed, spread=spread)
    choice = Choice(objective=objective, correction=correction, anchor=anchor)
    choice.age_tightening = tightening if correction not in ("none", "fade") else 0.0
    choice.self_normalise = normalise and correction in WEIGHTS
    for aggregation in AGGREGATIONS:
        agree(replace(choice, aggregation=aggregation), sequences)


BOUNDS = {
    "ppo_clip": {"clip_low": st.floats(0, 0.9), "clip_high": st.floats(0, 3), "dual_clip": st.sampled_from([0, 1.5])},
    "gspo": {"clip_low": st.floats(0, 0.3), "clip_high": st.floats(0, 0.3)},
    "m2po": {"clip_low": st.floats(0, 0.5), "clip_high": st.floats(0, 0.5)},
    "cispo": {"weight_max": st.floats(1, 9)},
    "dppo_tv": {"weight_max": st.floats(1, 9), "divergence": st.floats(0, 0.5)},
    "sapo": {"tau_positive": st.floats(0.1, 4), "tau_negative": st.floats(0.1, 4)},
    "topr": {"topr_level": st.sampled_from(["token", "sequence"])},
    "delightful": {"eta": st.floats(0.1, 5)},
}


@pytest.mark.parametrize("objective", BOUNDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), spread=SPREADS)
def test_bounds_of_objectives_mean_what_the_formula_says(objective, data, seed, spread):
    choice = Choice(objective=objective, bounds={k: data.draw(v, k) for k, v in BOUNDS[objective].items()})
    agree(choice, random_sequences(seed, spread=spread))


CORRECTION_BOUNDS = {
    "token_tis": {"correction_cap": st.floats(1, 9)},
    "sequence_tis": {"correction_cap": st.floats(1, 9)},
    "icepop": {"correction_low": st.floats(0, 1), "correction_high": st.floats(1, 9)},
    "sequence_mask": {"correction_low": st.floats(0, 1), "correction_high": st.floats(1, 9)},
    "geometric_mask": {"correction_low": st.floats(0, 1), "correction_high": st.floats(1, 3)},
    "veto": {"correction_low": st.floats(0, 1), "correction_high": st.floats(1, 9)},
    "opsm": {"opsm_divergence": st.floats(0, 1)},
    "fade": {"fade_half_life": st.floats(0.1, 9)},
}


@pytest.mark.parametrize("correction", CORRECTION_BOUNDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), spread=SPREADS, tightening=st.floats(0, 2))
def test_bounds_of_corrections_mean_what_the_formula_says(correction, data, seed, spread, tightening):
    bounds = {k: data.draw(v, k) for k, v in CORRECTION_BOUNDS[correction].items()}
    choice = Choice(objective="reinforce", correction=correction, age_tightening=tightening, bounds=bounds)
    agree(choice, random_sequences(seed, spread=spread))


KL = [("k1", "loss", True), ("k1", "reward", False)]
KL += [(k, "loss", unbiased) for k in ("k2", "k3") for unbiased in (False, True)]


@pytest.mark.parametrize(("kl", "kl_in", "unbiased"), KL)
@pytest.mark.parametrize("objective", ["ppo_clip", "reinforce", "gspo"])
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), spread=SPREADS, beta=st.floats(1e-4, 2))
def test_kl_penalties_equal_the_loops(kl, kl_in, unbiased, objective, seed, spread, beta):
    choice = Choice(objective=objective, beta=beta, kl=kl, kl_in=kl_in, kl_unbiased=unbiased)
    if objective == "reinforce":
        choice.correction = "opsm"  # looks at the sign of the response's own advantage, not of the shaped one
    for aggregation in AGGREGATIONS:
        agree(replace(choice, aggregation=aggregation), random_sequences(seed, spread=spread))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.05, 0.3, 1.0, 5.0]), budget=st.floats(0.001, 0.5))
def test_second_moment_threshold_is_the_exact_one_within_a_bin(seed, spread, budget):
    sequences = random_sequences(seed, num=20, spread=spread)
    logprobs_T, batch = make_batch(sequences, "token_mean")
    algo = algorithm_of(Choice(objective="m2po"))
    found = float(second_moment.threshold(algo.statistics(logprobs_T.detach(), batch), budget))
    exact = second_moment_threshold(Choice(objective="m2po"), sequences, budget)
    assert math.log(found / exact) == pytest.approx(0, abs=0.006)
