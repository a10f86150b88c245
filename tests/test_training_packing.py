"""Packing: every sequence once, the budget kept, ranks in step, nothing depends on chance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.training.packing import pack, plan

lengths_of_batches = st.lists(st.integers(1, 64), max_size=60)


@given(lengths_of_batches, st.integers(1, 5), st.integers(64, 200))
@settings(max_examples=200, deadline=None)
def test_every_sequence_is_packed_once_within_the_budget(lengths, num_ranks, budget):
    dealt = plan(lengths, num_ranks=num_ranks, budget=budget)
    assert len(dealt) == num_ranks
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    members = [int(i) for rank in dealt for micro_batch in rank for i in micro_batch]
    assert sorted(members) == list(range(len(lengths)))
    assert all(np.asarray(lengths)[m].sum() <= budget for rank in dealt for m in rank if len(m))


@given(lengths_of_batches, st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_fixed_count_of_micro_batches_is_kept(lengths, num_ranks, count):
    dealt = plan(lengths, num_ranks=num_ranks, budget=1, count=count)
    assert [len(rank) for rank in dealt] == [count] * num_ranks
    assert sum(len(m) for rank in dealt for m in rank) == len(lengths)


def test_the_plan_is_the_same_each_time():
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    first, second = (plan(lengths, num_ranks=4, budget=2000) for _ in range(2))
    assert all(np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def test_ranks_are_balanced_by_cost_and_few_micro_batches_are_made():
    lengths = np.random.default_rng(1).integers(10, 1000, 512)
    dealt = plan(lengths, num_ranks=4, budget=8192)
    assert len(dealt[0]) <= np.ceil(lengths.sum() / (4 * 8192)) + 1
    cost = lengths + 1e-3 * lengths.astype(float) ** 2
    for at_once in zip(*dealt, strict=True):
        costs = [cost[m].sum() for m in at_once]
        assert max(costs) / min(costs) < 1.1


def test_a_sequence_above_the_budget_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="tokens_per_micro_batch = 50; raise it"):
        plan([10, 51], num_ranks=1, budget=50)


def test_a_sequence_without_tokens_is_refused():
    with pytest.raises(ValueError, match="length 0"):
        plan([3, 0], num_ranks=1, budget=50)


def test_packed_positions_targets_and_predictors_line_up():
    packed = pack(
        [np.array([5, 6, 7]), np.array([8, 9, 10, 11])], [np.array([0, 1, 1], bool), np.array([0, 0, 1, 0], bool)]
    )
    assert packed.token_ids_S.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert packed.positions_S.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.targets_T.tolist() == [6, 7, 10]
    assert packed.predictors_T.tolist() == [0, 1, 4]
    assert packed.sequence_T.tolist() == [0, 0, 1]


def test_an_empty_micro_batch_has_one_token_and_trains_nothing():
    packed = pack([], [])
    assert packed.lengths.tolist() == [1]
    assert len(packed.targets_T) == 0


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pack([np.array([1, 2])], [np.array([1, 1], bool)])
