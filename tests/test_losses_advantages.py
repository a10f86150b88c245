"""Advantages: each estimator against its formula in plain loops, whatever order groups arrive in, and never NaN."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import ADVANTAGES, NEED_A_GROUP, compute
from asyncrl.losses.aggregation import token_weights

REWARDS = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 5)), elements=st.sampled_from([0, 1, 0.5]))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def oracle(name: str, rewards: list[list[float]]) -> list[list[float]]:
    every = [r for group in rewards for r in group]
    centred = [r - mean(group) for group in rewards for r in group]
    out = []
    for group in rewards:
        row = []
        for j, r in enumerate(group):
            siblings = group[:j] + group[j + 1 :]
            value = {
                "group_norm": lambda r=r, g=group: (r - mean(g)) / (statistics.stdev(g) + 1e-6),
                "group_mean": lambda r=r, g=group: r - mean(g),
                "leave_one_out": lambda r=r, o=siblings: r - mean(o),
                "batch_norm": lambda r=r, g=group: (r - mean(g)) / (statistics.stdev(centred) + 1e-6),
                "batch": lambda r=r: (r - mean(every)) / (statistics.stdev(every) + 1e-6),
                "max_rl": lambda r=r, g=group: (r - mean(g)) / mean(g) if mean(g) else 0.0,
                "raw": lambda r=r: r,
            }[name]()
            row.append(value)
        out.append(row)
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=30, deadline=None)
@given(rewards_PG=REWARDS)
def test_every_estimator_equals_its_formula(name, rewards_PG):
    wanted = np.array(oracle(name, rewards_PG.tolist()))
    np.testing.assert_allclose(compute(name, rewards_PG), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=30, deadline=None)
@given(rewards_PG=REWARDS, data=st.data())
def test_order_of_arrival_and_of_siblings_changes_no_advantage(name, rewards_PG, data):
    groups = data.draw(st.permutations(range(rewards_PG.shape[0])))
    siblings = data.draw(st.permutations(range(rewards_PG.shape[1])))
    shuffled = compute(name, rewards_PG[groups][:, siblings])
    np.testing.assert_allclose(shuffled, compute(name, rewards_PG)[groups][:, siblings], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"raw"}))
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6])
def test_equal_rewards_give_zero(name, reward):
    assert np.abs(compute(name, np.full((3, 4), reward))).max() < 1e-3


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_one_is_an_error_or_finite(name):
    if name in NEED_A_GROUP:
        with pytest.raises(ValueError, match="n_samples 2 or more"):
            compute(name, np.ones((4, 1)))
    else:
        assert np.isfinite(compute(name, np.array([[0.0], [1.0]]))).all()
        assert np.isfinite(compute(name, np.array([[1.0]]))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="must be finite"):
        compute("group_norm", np.array([[0.0, bad]]))


def test_rewards_without_groups_are_refused():
    with pytest.raises(ValueError, match="prompts, siblings"):
        compute("group_norm", np.zeros(4))


def test_max_rl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="rewards of 0 and 1"):
        compute("max_rl", np.array([[-1.0, 1.0]]))


def test_dynamic_sampling_drops_groups_of_equal_rewards_alone():
    algo = Algorithm(dynamic_sampling=True)
    assert not algo.keep(np.array([1.0, 1.0, 1.0]))
    assert not algo.keep(np.array([0.1, 0.1]))
    assert algo.keep(np.array([1.0, 0.0, 1.0]))
    assert Algorithm().keep(np.array([1.0, 1.0]))


LENGTHS = hnp.arrays(np.int64, st.integers(1, 8), elements=st.integers(0, 20))


@given(lengths_B=LENGTHS)
def test_token_weights_equal_their_formulas(lengths_B):
    total, num = max(int(lengths_B.sum()), 1), len(lengths_B)
    for name, wanted in {
        "token_mean": lambda length: 1 / total,
        "sequence_mean": lambda length: 1 / (num * max(length, 1)),
        "sequence_sum": lambda length: 1 / num,
        "constant": lambda length: 1 / (num * 32),
    }.items():
        found = token_weights(name, lengths_B, 32)
        np.testing.assert_allclose(found, [wanted(int(n)) for n in lengths_B], rtol=1e-12)


def test_averages_sum_to_one_over_the_batch():
    lengths_B = np.array([3, 1, 7])
    for name in ("token_mean", "sequence_mean"):
        assert (token_weights(name, lengths_B, 8) * lengths_B).sum() == pytest.approx(1)


def test_constant_aggregation_needs_a_constant_and_names_are_checked():
    with pytest.raises(ValueError, match="max_tokens >= 1"):
        token_weights("constant", np.array([1]), 0)
    with pytest.raises(ValueError, match="must be one of token_mean"):
        token_weights("mean", np.array([1]), 8)
    assert len(token_weights("token_mean", np.array([], dtype=np.int64), 8)) == 0
