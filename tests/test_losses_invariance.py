"""What must hold for every loss: the gradient on fresh data, any cut and order of the batch, extremes, denominators."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_helpers import (
    AGGREGATIONS,
    MAX_TOKENS,
    algorithm_of,
    allowed,
    loss_and_gradient,
    make_batch,
    on_policy,
    random_sequences,
)
from losses_oracle import Choice

from asyncrl.algorithm import Algorithm
from asyncrl.losses import diagnostics, pipeline
from asyncrl.losses.aggregation import token_weights
from asyncrl.losses.corrections import CORRECTIONS, WEIGHTS
from asyncrl.losses.kl import penalty
from asyncrl.losses.objectives import OBJECTIVES

torch.set_num_threads(1)
COMBINATIONS = sorted(set(allowed(target_lag=2)) | set(allowed(target_lag=0)))
SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize(("objective", "correction", "anchor"), [c for c in COMBINATIONS if c[0] != "delightful"])
@settings(max_examples=1, deadline=None)
@given(seed=SEEDS)
def test_on_fresh_data_every_objective_is_reinforce(objective, correction, anchor, seed):
    sequences = on_policy(random_sequences(seed), fresh=correction == "fade")
    for aggregation in AGGREGATIONS:
        choice = Choice(objective=objective, correction=correction, anchor=anchor, aggregation=aggregation)
        choice.self_normalise = correction in WEIGHTS
        logprobs_T, batch = make_batch(sequences, aggregation, dtype=torch.float32)
        _, gradient_T = loss_and_gradient(algorithm_of(choice), logprobs_T, batch)
        torch.testing.assert_close(gradient_T, -batch.advantages_T * batch.weights_T, rtol=1e-6, atol=0)


def test_delightful_on_fresh_data_is_reinforce_times_its_gate():
    logprobs_T, batch = make_batch(on_policy(random_sequences(1)), "token_mean")
    _, gradient_T = loss_and_gradient(Algorithm(objective="delightful"), logprobs_T, batch)
    gate_T = 1 / (1 + (batch.advantages_T * logprobs_T.detach()).exp())
    torch.testing.assert_close(gradient_T, -gate_T * batch.advantages_T * batch.weights_T)


@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_on_fresh_data_every_correction_weighs_exactly_one(correction, seed):
    logprobs_T, batch = make_batch(
        on_policy(random_sequences(seed), fresh=correction == "fade"), "token_mean", dtype=torch.float32
    )
    algo = Algorithm(objective="reinforce", correction=correction, age_tightening=0.5)
    tokens = pipeline.make_tokens(algo, logprobs_T, batch)
    assert torch.equal(pipeline.correction(algo, tokens), torch.ones_like(logprobs_T))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_on_fresh_data_every_kl_is_zero(estimator, unbiased):
    theta_T = torch.tensor([-0.3, -2.0, -9.0])
    assert torch.equal(penalty(estimator, theta_T, theta_T, theta_T, unbiased=unbiased), torch.zeros(3))


def cut_gradients(algo: Algorithm, sequences, order: list[int], cuts: list[int]) -> list[torch.Tensor]:
    """Gradients per sequence, in their first order, when the batch is cut in this order at these places."""
    lengths = np.array([len(s.theta) for s in sequences])
    weights_B = token_weights(algo.aggregation, lengths, MAX_TOKENS)  # of the whole batch
    parts = [p for p in np.split(np.array(order), sorted(cuts)) if len(p)]
    micros = [
        make_batch([sequences[i] for i in p], algo.aggregation, weights_B=weights_B[p], dtype=torch.float32)
        for p in parts
    ]
    if algo.needs().statistics:
        each = [algo.statistics(logprobs_T.detach(), batch) for logprobs_T, batch in micros]
        whole = {name: torch.stack([e[name] for e in each]).sum(0) for name in each[0]}
        for _, batch in micros:
            batch.statistics = whole
    found: dict[int, torch.Tensor] = {}
    for part, (logprobs_T, batch) in zip(parts, micros, strict=True):
        (algo.loss(logprobs_T, batch)[0] * batch.weights_T).sum().backward()
        found |= dict(zip(part.tolist(), logprobs_T.grad.split(lengths[part].tolist()), strict=True))
    return [found[i] for i in range(len(sequences))]


SHAPED = [{"beta": 0.1, "kl_in": "reward"}, {"beta": 0.1, "kl": "k3", "kl_unbiased": True}]
CUTS = [{"objective": o, "correction": c, "anchor": a} for o, c, a in COMBINATIONS] + SHAPED
CUTS += [{"objective": "reinforce", "correction": c, "self_normalise": True} for c in sorted(WEIGHTS)]


@pytest.mark.parametrize("keys", CUTS, ids=lambda k: "-".join(str(v) for v in k.values()))
@settings(max_examples=2, deadline=None)
@given(seed=SEEDS, data=st.data())
def test_any_cut_and_any_order_give_the_same_gradients(keys, seed, data):
    sequences = random_sequences(seed, num=6)
    order = data.draw(st.permutations(range(6)))
    cuts = data.draw(st.lists(st.integers(0, 6), max_size=5))
    for aggregation in AGGREGATIONS:
        algo = Algorithm(aggregation=aggregation, **keys)
        whole = cut_gradients(algo, sequences, list(range(6)), [])
        largest = max(g.abs().max() for g in whole)
        for ours, wanted in zip(cut_gradients(algo, sequences, order, cuts), whole, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6 * float(largest))


EXTREMES = [1e3, -1e3, 88.0, -88.0, 0.0]


@pytest.mark.parametrize(("objective", "correction", "anchor"), COMBINATIONS)
def test_extreme_log_ratios_give_finite_losses_and_gradients(objective, correction, anchor):
    for kl in ({}, {"beta": 1.0, "kl": "k3", "kl_unbiased": True}):
        sequences = random_sequences(3, num=len(EXTREMES))
        for sequence, gap in zip(sequences, EXTREMES, strict=True):
            for name, shift in (("theta", min(gap, 0)), ("mu", min(-gap, 0)), ("prox", -abs(gap) / 2), ("ref", -1e3)):
                setattr(sequence, name, [v + shift for v in getattr(sequence, name)])
        for sign in (1, -1):
            for sequence in sequences:
                sequence.advantage = sign * abs(sequence.advantage)
            algo = Algorithm(objective=objective, correction=correction, anchor=anchor, **kl)
            logprobs_T, batch = make_batch(sequences, "token_mean", dtype=torch.float32)
            loss, gradient_T = loss_and_gradient(algo, logprobs_T, batch)
            assert np.isfinite(loss)
            assert gradient_T.isfinite().all()


def test_extreme_log_ratios_are_counted():
    sequences = random_sequences(3, num=2)
    sequences[0].mu = [-1e3] * len(sequences[0].mu)
    logprobs_T, batch = make_batch(sequences, "token_mean", dtype=torch.float32)
    row = diagnostics.report(diagnostics.sums(logprobs_T, batch))
    assert row["ratio/bounded"] == pytest.approx(len(sequences[0].mu) / len(logprobs_T))
    assert all(np.isfinite(v) for v in row.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_batch_has_no_loss_and_raises_nothing(objective, aggregation):
    logprobs_T, batch = make_batch([], aggregation, dtype=torch.float32)
    loss, gradient_T = loss_and_gradient(Algorithm(objective=objective, correction="opsm", beta=0.1), logprobs_T, batch)
    assert (loss, len(gradient_T)) == (0.0, 0)
    assert diagnostics.report(diagnostics.sums(logprobs_T, batch))["ratio/ess"] == 1.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_rewards_train_nothing(objective):
    algo = Algorithm(objective=objective)
    sequences = random_sequences(5, num=4)
    for sequence, advantage in zip(sequences, algo.advantages(np.full((1, 4), 0.1))[0], strict=True):
        sequence.advantage = float(advantage)
    _, gradient_T = loss_and_gradient(algo, *make_batch(sequences, "token_mean", dtype=torch.float32))
    assert gradient_T.abs().max() < 1e-9


@pytest.mark.parametrize("correction", sorted(set(CORRECTIONS)))
def test_rejected_tokens_keep_their_place_in_the_denominator(correction):
    """Adding hopelessly stale data never enlarges what the rest contributes."""
    fresh = on_policy(random_sequences(7, num=3))
    stale = on_policy(random_sequences(8, num=3))
    for sequence in stale:
        sequence.theta, sequence.advantage = [v - 15 for v in sequence.mu], -1.0
        sequence.lags = [40] * len(sequence.lags)
    algo = Algorithm(objective="reinforce", correction=correction)
    _, alone_T = loss_and_gradient(algo, *make_batch(fresh, "token_mean"))
    _, both_T = loss_and_gradient(algo, *make_batch(fresh + stale, "token_mean"))
    share = len(alone_T) / len(both_T)
    torch.testing.assert_close(both_T[: len(alone_T)], alone_T * share)
    assert both_T[len(alone_T) :].abs().max() < 1e-4
