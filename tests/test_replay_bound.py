"""The staleness bound against its worst case: one straggler, held back while the window lets the others pass."""

from __future__ import annotations

import pytest
from replay_helpers import make_buffer, make_parcel

from asyncrl.replay.buffer import Buffer
from asyncrl.replay.limiter import least_max_lag


def lag_of_straggler(buffer: Buffer, straggler: int, *, sync_interval: int) -> int:
    """Everybody answers at once except the lease of prompt `straggler`, which answers when nothing else can happen.

    Returns the largest lag at which its group is trained; the trainer stops after its last use.
    """
    held, worst = None, 0
    while True:
        for seat in buffer.lease(1000, owner="g", request=0, now=0.0):
            if seat.position == straggler:
                held = seat
            else:
                buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version]))
        version = buffer.step
        batch = buffer.take(step=version + 1, num_groups=buffer.limits.batch_size, version=version)
        if batch is None:
            assert held is not None, "the trainer waits although nothing is held back"
            buffer.insert(held.lease_id, make_parcel(held.lease_id, versions=[held.version]))
            continue
        if held is not None:
            mine = [p for p in batch if p.lease_id == held.lease_id]
            worst = max([worst, *(version - p.oldest_version for p in mine)])
            if held.uses == buffer.limits.reuse:
                return worst
        if buffer.step % sync_interval == 0:
            buffer.publish(version=buffer.step, step=buffer.step)


SHAPES = [(1, 1, 0), (1, 1, 2), (3, 1, 0), (3, 1, 1), (4, 2, 2), (2, 3, 1), (5, 1, 3)]


def worst_lag(P: int, S: int, M: int, *, sync_interval: int) -> int:
    def of(straggler: int) -> int:
        buffer = make_buffer(P=P, target_lag=S, max_lag=M, sync_interval=sync_interval)
        return lag_of_straggler(buffer, straggler, sync_interval=sync_interval)

    return max(of(straggler) for straggler in range((S + 3) * P * sync_interval))


@pytest.mark.parametrize(("P", "S", "slack"), SHAPES)
def test_bound_is_reached_and_never_passed(P: int, S: int, slack: int) -> None:
    assert worst_lag(P, S, S + slack, sync_interval=1) == S + slack


@pytest.mark.parametrize(("P", "S", "slack"), SHAPES)
def test_bound_holds_when_not_every_step_publishes(P: int, S: int, slack: int) -> None:
    assert worst_lag(P, S, S + slack, sync_interval=2) <= S + slack


@pytest.mark.parametrize(
    ("P", "S", "r", "slack"), [(2, 1, 2, 0), (3, 1, 2, 1), (4, 2, 3, 0), (2, 3, 2, 2), (5, 2, 2, 1)]
)
def test_bound_holds_with_reuse(P: int, S: int, r: int, slack: int) -> None:
    M = least_max_lag(target_lag=S, batch_size=P, reuse=r) + slack
    for straggler in range((S + 3) * P):
        assert lag_of_straggler(make_buffer(P=P, target_lag=S, max_lag=M, reuse=r), straggler, sync_interval=1) <= M


def test_synchronous_run_has_no_lag_at_all() -> None:
    for straggler in range(8):
        assert lag_of_straggler(make_buffer(P=3, target_lag=0), straggler, sync_interval=1) == 0
