"""The admission bound and the window: small cases by hand, and the arithmetic against definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_helpers import limits_of

from asyncrl.replay.limiter import max_lag_of, window_of


def test_synchronous_run_admits_one_batch_until_its_version_is_live() -> None:
    limits = limits_of(P=4, target_lag=0)
    assert (limits.max_lag, limits.window) == (0, 1)
    assert limits.room(trained=0, committed=0) == 4
    assert limits.room(trained=0, committed=4) == 0
    assert limits.room(trained=4, committed=4) == 4


def test_room_is_never_negative() -> None:
    assert limits_of(P=4, target_lag=1).room(trained=0, committed=100) == 0


def test_window_of_the_default_lag() -> None:
    limits = limits_of(P=32)
    assert (limits.target_lag, limits.max_lag, limits.window) == (2, 4, 65)


def test_fifo_bounds_the_lag_by_the_target() -> None:
    limits = limits_of(P=8, target_lag=3, order="fifo")
    assert (limits.max_lag, limits.window) == (3, 1)


def test_a_run_admits_what_its_steps_need_and_no_more() -> None:
    limits = limits_of(P=4, steps=3, target_lag=2)
    assert limits.room(trained=8, committed=0) == 12


@given(st.integers(1, 40), st.integers(0, 6), st.integers(1, 7), st.integers(0, 30))
def test_window_is_the_largest_that_keeps_the_bound(P: int, S: int, r: int, M: int) -> None:
    shape = {"target_lag": S, "batch_size": P, "reuse": r}
    if max_lag_of(window=1, **shape) > M:
        with pytest.raises(ValueError, match=r"replay\.max_lag must be at least"):
            window_of(max_lag=M, **shape)
        return
    W = window_of(max_lag=M, **shape)
    assert max_lag_of(window=W, **shape) <= M < max_lag_of(window=W + 1, **shape)


@given(st.integers(1, 40), st.integers(0, 6), st.integers(1, 200))
def test_bound_without_reuse_is_the_one_of_the_design(P: int, S: int, W: int) -> None:
    assert max_lag_of(window=W, target_lag=S, batch_size=P, reuse=1) == S + -(-(W - 1) // P)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reuse": 3, "target_lag": 1}, "lower reuse to 2 or raise target_lag to 2"),
        ({"sync_interval": 3, "target_lag": 1}, "lower sync_interval to 2 or raise target_lag to 2"),
        ({"sync_interval": 2, "reuse": 3, "target_lag": 2}, "together need replay.target_lag 3"),
        ({"capacity_groups": 1}, "must hold one batch of 2 groups"),
        ({"max_lag": 1, "target_lag": 2}, "replay.max_lag must be at least 2"),
        ({"reuse": 0}, "replay.reuse must be at least 1"),
        ({"target_lag": -1}, "replay.target_lag must be at least 0"),
        ({"P": 0}, "training.batch_size must be at least 1"),
    ],
)
def test_settings_that_would_wait_for_ever_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limits_of(**settings)
