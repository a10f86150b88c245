"""The buffer by hand: leases, expiry, drops, batches, order, capacity, end of data, the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_helpers import lease_all, make_buffer, make_parcel

from asyncrl.replay.buffer import MAX_ATTEMPTS, Buffer
from asyncrl.replay.ledger import EndlessRejection
from asyncrl.replay.line import Line, Seat
from asyncrl.replay.samplers import oldest_first
from asyncrl.replay.staleness import StalenessExceeded
from asyncrl.types import NOT_SAMPLED, Prompt


def fill(buffer: Buffer, leases: list[int], *, version: int = 0, length: int = 3) -> None:
    for lease in leases:
        assert buffer.insert(lease, make_parcel(lease, versions=[version], length=length))


def take(buffer: Buffer, step: int, version: int | None = None) -> list[int] | None:
    """Lease ids of the batch."""
    taken = buffer.take(
        step=step, num_groups=buffer.limits.batch_size, version=step - 1 if version is None else version
    )
    return None if taken is None else [p.lease_id for p in taken]


def test_no_lease_before_the_first_weights() -> None:
    buffer = make_buffer(live=False)
    assert lease_all(buffer) == []
    buffer.publish(version=0, step=0)
    assert lease_all(buffer) != []


def test_admission_rises_when_the_version_is_live_not_when_the_batch_is_taken() -> None:
    buffer = make_buffer(P=2, target_lag=0)
    leases = lease_all(buffer)
    assert len(leases) == 2
    fill(buffer, leases)
    assert take(buffer, 1) == leases
    assert lease_all(buffer) == []
    buffer.publish(version=1, step=1)
    assert len(lease_all(buffer)) == 2


def test_take_waits_for_a_whole_batch_and_is_idempotent() -> None:
    buffer = make_buffer(P=2, target_lag=1)
    leases = lease_all(buffer)
    fill(buffer, leases[:1])
    assert take(buffer, 1) is None
    fill(buffer, leases[1:])
    assert take(buffer, 1) == leases[:2] == take(buffer, 1)
    assert take(buffer, 2) == leases[2:4]
    assert take(buffer, 1) == leases[:2]


def test_step_out_of_turn_is_refused() -> None:
    buffer = make_buffer()
    with pytest.raises(ValueError, match="step 2 cannot be taken after step 0"):
        take(buffer, 2)


def test_batch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch has 2 groups"):
        make_buffer(P=2).take(step=1, num_groups=3, version=0)


def test_dropped_group_frees_its_admission_and_its_place() -> None:
    buffer = make_buffer(P=2, target_lag=0)
    a, b = lease_all(buffer)
    assert buffer.drop(a, "filtered", num_tokens=7)
    (c,) = lease_all(buffer)
    fill(buffer, [b, c])
    assert take(buffer, 1) == [b, c]
    assert buffer.accounts()["dropped/filtered"] == 1
    assert buffer.accounts()["ledger_tokens/started"] == 7 + 6


def test_every_generator_gets_an_equal_part_of_the_leases() -> None:
    buffer = make_buffer(P=4, target_lag=1)
    shares = {}
    for owner in "abc":
        shares[owner] = buffer.share(owner, num_owners=3)
        buffer.lease(min(3, shares[owner]), owner=owner, request=0, now=0.0)
    assert shares == {"a": 3, "b": 3, "c": 3}  # of 8: the last to ask finds two
    assert [sum(s.owner == owner for s in buffer.leased.values()) for owner in "abc"] == [3, 3, 2]
    fill(buffer, [s.lease_id for s in list(buffer.leased.values()) if s.owner != "c"][:4])
    take(buffer, 1)
    buffer.publish(version=1, step=1)
    assert buffer.room() == 4
    assert [buffer.share(owner, num_owners=3) for owner in "abc"] == [3, 2, 2]


def test_expired_lease_is_leased_again_in_its_old_place() -> None:
    buffer = make_buffer(P=2, target_lag=1)
    a, b, c, d = lease_all(buffer, now=0.0)
    buffer.renew("g", {b, c, d}, acked=0, now=500.0)
    assert buffer.expire(700.0) == 1
    assert not buffer.insert(a, make_parcel(a, versions=[0]))
    (again,) = buffer.lease(9, owner="h", request=0, now=700.0)
    assert (again.prompt.id, again.attempt) == (0, 1)
    fill(buffer, [b, c, d, again.lease_id])
    assert take(buffer, 1) == [again.lease_id, b]


def test_one_leaked_lease_in_a_synchronous_run_does_not_stop_it() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    (leaked,) = lease_all(buffer, now=0.0)
    for now in range(0, 2000, 100):  # heartbeats go on renewing it, since its generator believes it is at work
        buffer.renew("g", {leaked}, acked=10, now=float(now))
        buffer.expire(float(now))
    (again,) = buffer.lease(1, owner="g", request=11, now=2000.0)
    fill(buffer, [again.lease_id])
    assert take(buffer, 1) == [again.lease_id]


def test_lease_whose_reply_was_lost_is_found_by_the_next_heartbeat() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    (seat,) = buffer.lease(1, owner="g", request=5, now=0.0)
    buffer.renew("g", set(), acked=5, now=1.0)  # the reply to request 5 may still be on its way
    assert seat.lease_id in buffer.leased
    buffer.renew("g", set(), acked=6, now=2.0)
    assert not buffer.leased
    assert buffer.room() == 1


def test_dead_generator_loses_its_leases_only() -> None:
    buffer = make_buffer(P=2, target_lag=0)
    buffer.lease(1, owner="g", request=0, now=0.0)
    buffer.lease(1, owner="h", request=0, now=0.0)
    assert buffer.release("g") == 1
    assert len(buffer.leased) == 1


def test_prompt_that_keeps_killing_generators_is_given_up() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    for _ in range(MAX_ATTEMPTS):
        (seat,) = buffer.lease(1, owner="g", request=0, now=0.0)
        assert seat.prompt.id == 0
        buffer.release("g")
    (seat,) = buffer.lease(1, owner="g", request=0, now=0.0)
    assert seat.prompt.id == 1


def test_straggler_is_overtaken_within_the_window_and_then_waited_for() -> None:
    buffer = make_buffer(P=2, target_lag=1, max_lag=2)
    assert buffer.limits.window == 3
    leases = lease_all(buffer)
    fill(buffer, leases[1:])
    assert take(buffer, 1) == leases[1:3]
    buffer.publish(version=1, step=1)
    more = lease_all(buffer)
    fill(buffer, more, version=1)
    assert take(buffer, 2) is None
    fill(buffer, leases[:1])
    assert take(buffer, 2) == [leases[0], leases[3]]


def test_fifo_waits_for_the_oldest() -> None:
    buffer = make_buffer(P=1, target_lag=2, order="fifo")
    leases = lease_all(buffer)
    fill(buffer, leases[1:])
    assert take(buffer, 1) is None
    fill(buffer, leases[:1])
    assert take(buffer, 1) == leases[:1]


def test_freshest_and_priority_choose_within_the_window() -> None:
    fresh = make_buffer(P=1, target_lag=3, max_lag=5, order="freshest")
    leases = lease_all(fresh)
    for lease, version in zip(leases, [0, 2, 1, 0], strict=True):
        fresh.insert(lease, make_parcel(lease, versions=[version]))
    assert take(fresh, 1, version=3) == [leases[1]]
    eager = make_buffer(P=1, target_lag=1, order="priority")
    leases = lease_all(eager)
    eager.insert(leases[0], make_parcel(leases[0], versions=[0]))
    eager.insert(leases[1], make_parcel(leases[1], versions=[0, 0]))  # two rewards that differ
    assert take(eager, 1) == [leases[1]]


def test_uniform_order_does_not_depend_on_when_it_is_asked() -> None:
    def batch() -> list[int] | None:
        buffer = make_buffer(P=2, target_lag=3, order="uniform")
        fill(buffer, lease_all(buffer))
        return take(buffer, 1)

    assert batch() == batch()


def test_stale_groups_are_dropped_and_replaced_when_the_user_chose_so() -> None:
    buffer = make_buffer(P=1, target_lag=2, max_lag=2, order="freshest", stale="drop")
    leases = lease_all(buffer)
    for lease, version in zip(leases, [0, 1, 4], strict=True):
        buffer.insert(lease, make_parcel(lease, versions=[version]))
    assert take(buffer, 1, version=4) == [leases[2]]
    assert buffer.accounts()["dropped/stale"] == 2
    assert buffer.accounts()["ledger/balance"] == 0
    assert len(lease_all(buffer)) == 2
    assert buffer.dropped_means.num == 2


def test_group_older_than_the_bound_raises() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    fill(buffer, lease_all(buffer))
    with pytest.raises(
        StalenessExceeded, match="sampled at version 0, 3 versions before the trainer's 3; max_lag is 0"
    ):
        take(buffer, 1, version=3)


def test_group_from_the_future_raises() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    fill(buffer, lease_all(buffer), version=2)
    with pytest.raises(StalenessExceeded, match="has tokens of version 2"):
        take(buffer, 1, version=0)


def test_group_older_than_its_lease_is_not_accepted() -> None:
    buffer = make_buffer(P=1, target_lag=1)
    fill(buffer, lease_all(buffer))
    take(buffer, 1)
    buffer.publish(version=1, step=1)
    (seat,) = buffer.lease(1, owner="g", request=0, now=0.0)
    assert not buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[0]))
    assert buffer.accounts()["dropped/stale"] == 1
    (again,) = buffer.lease(1, owner="g", request=0, now=0.0)
    assert again.prompt == seat.prompt


def test_group_that_trains_no_token_has_no_age() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    fill(buffer, lease_all(buffer), version=NOT_SAMPLED)
    assert take(buffer, 1, version=0) is not None


def test_group_is_used_as_often_as_reuse_says_and_once_per_batch() -> None:
    buffer = make_buffer(P=2, target_lag=1, reuse=2)
    leases = lease_all(buffer)
    assert len(leases) == 2
    fill(buffer, leases)
    assert take(buffer, 1) == leases
    assert buffer.accounts()["ledger/buffered"] == 2
    assert take(buffer, 2, version=1) == leases
    assert buffer.accounts()["ledger/trained"] == 2
    assert take(buffer, 3, version=2) is None


def test_full_buffer_holds_producers_back_and_drops_nothing() -> None:
    buffer = make_buffer(P=2, target_lag=3, capacity_groups=3)
    leases = lease_all(buffer)
    assert len(leases) == 3
    fill(buffer, leases)
    assert lease_all(buffer) == []
    take(buffer, 1)
    assert len(lease_all(buffer)) == 2


def test_bound_in_bytes_holds_producers_back_but_never_the_first_batch() -> None:
    size = make_parcel(0, versions=[0], length=1000).nbytes
    buffer = make_buffer(P=2, target_lag=8, capacity_bytes=3 * size)
    first = lease_all(buffer, 1)
    fill(buffer, first, length=1000)
    assert len(lease_all(buffer)) == 2
    small = make_buffer(P=4, target_lag=8, capacity_bytes=1)
    fill(small, lease_all(small, 1), length=1000)
    assert len(lease_all(small)) == 3


def test_end_of_the_data_ends_the_run_and_counts_what_is_left() -> None:
    buffer = make_buffer(P=2, target_lag=3, total=3)
    leases = lease_all(buffer)
    assert len(leases) == 3
    assert not buffer.over
    fill(buffer, leases)
    assert take(buffer, 1) == leases[:2]
    assert take(buffer, 2) == []
    assert buffer.over
    assert buffer.accounts()["ledger/buffered"] == 1
    assert buffer.accounts()["ledger/balance"] == 0


def test_end_of_the_data_waits_for_what_is_in_flight() -> None:
    buffer = make_buffer(P=2, target_lag=3, total=2)
    a, b = lease_all(buffer)
    assert lease_all(buffer) == []
    fill(buffer, [a])
    assert take(buffer, 1) is None
    buffer.release("g")
    assert take(buffer, 1) is None
    (again,) = lease_all(buffer)
    fill(buffer, [again])
    assert take(buffer, 1) == [a, again]
    assert b != again


def test_endless_rejection_ends_with_a_name() -> None:
    buffer = make_buffer(P=2, target_lag=0, max_filtered=3)
    for _ in range(5):
        buffer.drop(lease_all(buffer, 1)[0], "filtered")
    with pytest.raises(EndlessRejection, match=r"6 leases in a row .*5 filtered, 1 reward_error"):
        buffer.drop(lease_all(buffer, 1)[0], "reward_error")


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("filtered", "too hard or too easy"),
        ("too_long", "raise training.seq_len"),
        ("rollout_error", "envs check"),
    ],
)
def test_endless_rejection_says_what_may_be_done_about_this_reason_alone(reason: str, remedy: str) -> None:
    buffer = make_buffer(P=2, target_lag=0, max_filtered=1)
    buffer.drop(lease_all(buffer, 1)[0], reason)
    with pytest.raises(EndlessRejection, match=remedy) as caught:
        buffer.drop(lease_all(buffer, 1)[0], reason)
    others = {"too hard or too easy", "raise training.seq_len", "envs check"} - {remedy}
    assert not any(other in str(caught.value) for other in others)


def test_one_accepted_group_ends_a_row_of_rejections() -> None:
    buffer = make_buffer(P=2, target_lag=0, max_filtered=1)
    buffer.drop(lease_all(buffer, 1)[0], "filtered")
    fill(buffer, lease_all(buffer, 1))
    buffer.drop(lease_all(buffer, 1)[0], "filtered")


def test_repeated_insert_is_accepted_and_changes_nothing() -> None:
    buffer = make_buffer(P=1, target_lag=0)
    leases = lease_all(buffer)
    fill(buffer, leases * 2)
    assert len(buffer.buffered) == 1
    take(buffer, 1)
    fill(buffer, leases)
    assert buffer.accounts()["ledger/balance"] == 0
    assert not buffer.buffered


def test_finished_run_grants_nothing() -> None:
    buffer = make_buffer()
    buffer.finish("done")
    assert buffer.over
    assert lease_all(buffer) == []


def test_environment_that_skips_an_id_is_refused() -> None:
    buffer = make_buffer()
    next(buffer.prompts)
    with pytest.raises(ValueError, match="expected 0, got 1"):
        lease_all(buffer)


@given(st.lists(st.sampled_from("wbu"), max_size=20), st.integers(1, 5), st.none() | st.integers(1, 8))
def test_default_order_needs_no_heap(states: list[str], num_groups: int, window: int | None) -> None:
    """w: waiting or in flight, b: buffered, u: used up."""
    line, parcel = Line(), make_parcel(0, versions=[0])
    for position, state in enumerate(states):
        seat = Seat(position=position, prompt=Prompt(id=position, prompt=""), used_up=state == "u")
        seat.parcel = parcel if state == "b" else None
        line.append(seat)
    general = line.choose(step=1, num_groups=num_groups, window=window, sampler=lambda seat, step: seat.position)
    fast = line.choose(step=1, num_groups=num_groups, window=window, sampler=oldest_first)
    assert general == fast


def test_a_full_buffer_does_not_keep_the_prompt_that_everybody_waits_for_from_its_next_lease() -> None:
    """Groups turned out larger than the capacity in bytes, and the oldest lease expired: the buffer cannot empty
    before it is leased again."""
    buffer = make_buffer(order="fifo", P=2, target_lag=1, capacity_bytes=1000)
    first, *others = lease_all(buffer, 2) + lease_all(buffer, 2)
    for lease_id in others:
        buffer.insert(lease_id, make_parcel(lease_id, versions=[0], length=5000))
    buffer.drop(first, "expired")
    assert buffer.take(step=1, num_groups=2, version=0) is None
    (again,) = lease_all(buffer)
    buffer.insert(again, make_parcel(again, versions=[0]))
    assert buffer.take(step=1, num_groups=2, version=0) is not None
