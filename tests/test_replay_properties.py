"""Random histories of the buffer: the bound holds, the ledger closes after each operation, nothing waits for ever."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_helpers import make_buffer, make_parcel

from asyncrl.replay.buffer import Buffer

OWNERS = st.sampled_from(["a", "b", "c"])
REASONS = st.sampled_from(["filtered", "reward_timeout", "rollout_error", "aborted"])


class History(RuleBasedStateMachine):
    """A trainer that trains step t at version t - 1 and publishes when it likes; generators that do what they like."""

    buffer: Buffer

    @initialize(
        P=st.integers(1, 4),
        S=st.integers(0, 3),
        slack=st.integers(0, 3),
        r=st.integers(1, 3),
        q=st.integers(1, 3),
        order=st.sampled_from(["window", "fifo", "freshest", "uniform", "priority"]),
        drop=st.booleans(),
        capacity=st.none() | st.integers(0, 6),
        total=st.none() | st.integers(0, 30),
        steps=st.integers(1, 12),
    )
    def start(self, P, S, slack, r, q, order, drop, capacity, total, steps) -> None:
        assume(r <= S + 1 and q <= S + 1 and r + q <= S + 2)
        least = S + r + (-r) // P
        self.buffer = make_buffer(
            order=order,
            total=total,
            P=P,
            target_lag=S,
            max_lag=least + slack,
            reuse=r,
            sync_interval=q,
            stale="drop" if drop else "hold",
            capacity_groups=None if capacity is None else P + capacity,
            steps=steps,
        )
        self.q, self.steps, self.now = q, steps, 0.0
        self.ended: list[int] = []
        self.batches: dict[int, list[int]] = {}

    # Generators

    @rule(n=st.integers(1, 5), owner=OWNERS)
    def lease(self, n: int, owner: str) -> None:
        for seat in self.buffer.lease(n, owner=owner, request=0, now=self.now):
            assert seat.version == self.buffer.live_version

    @precondition(lambda self: self.buffer.leased)
    @rule(which=st.integers(0, 99), old=st.booleans(), length=st.integers(0, 4))
    def insert(self, which: int, old: bool, length: int) -> None:
        seat = list(self.buffer.leased.values())[which % len(self.buffer.leased)]
        version = seat.version if old else self.buffer.live_version
        assert self.buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[version, version], length=length))

    @precondition(lambda self: self.buffer.leased)
    @rule(which=st.integers(0, 99), reason=REASONS)
    def drop(self, which: int, reason: str) -> None:
        lease = list(self.buffer.leased)[which % len(self.buffer.leased)]
        assert self.buffer.drop(lease, reason, num_tokens=3)
        self.ended.append(lease)

    @rule(owner=OWNERS)
    def generator_dies(self, owner: str) -> None:
        self.ended += [s.lease_id for s in self.buffer.leased.values() if s.owner == owner]
        self.buffer.release(owner)

    @rule(owner=OWNERS, keep=st.sets(st.integers(0, 40)), passed=st.floats(0, 700))
    def time_passes(self, owner: str, keep: set[int], passed: float) -> None:
        before = set(self.buffer.leased)
        self.buffer.renew(owner, keep, acked=0, now=self.now)
        self.now += passed
        self.buffer.expire(self.now)
        self.ended += sorted(before - set(self.buffer.leased))

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 99))
    def zombie_inserts(self, which: int) -> None:
        lease = self.ended[which % len(self.ended)]
        assert not self.buffer.insert(lease, make_parcel(lease, versions=[0]))
        assert not self.buffer.drop(lease, "filtered")

    # Trainer

    def try_step(self) -> bool:
        """One take; True when it ended in a batch or in the end of the data."""
        step, version = self.buffer.step + 1, self.buffer.step
        taken = self.buffer.take(step=step, num_groups=self.buffer.limits.batch_size, version=version)
        if not taken:
            return taken is not None
        leases = [p.lease_id for p in taken]
        assert len(set(leases)) == self.buffer.limits.batch_size
        for parcel in taken:
            assert 0 <= version - parcel.oldest_version <= self.buffer.limits.max_lag or parcel.num_tokens == 0
        self.batches[step] = leases
        return True

    @precondition(lambda self: self.buffer.step < self.steps)
    @rule()
    def take(self) -> None:
        self.try_step()

    @precondition(lambda self: self.batches)
    @rule()
    def take_again(self) -> None:
        step = max(self.batches)
        again = self.buffer.take(step=step, num_groups=self.buffer.limits.batch_size, version=step - 1)
        assert again is not None
        assert [p.lease_id for p in again] == self.batches[step]

    @rule()
    def publish(self) -> None:
        step = self.buffer.step // self.q * self.q
        if step > self.buffer.live_version:
            self.buffer.publish(version=step, step=step)

    # What always holds

    @invariant()
    def ledger_closes(self) -> None:
        if not hasattr(self, "buffer"):
            return
        accounts = self.buffer.accounts()
        assert accounts["ledger/balance"] == 0
        assert accounts["ledger_tokens/balance"] == 0

    @invariant()
    def every_seat_is_in_one_place(self) -> None:
        if not hasattr(self, "buffer"):
            return
        buffer, reuse = self.buffer, self.buffer.limits.reuse
        in_line = [s for s in buffer.line if not s.used_up]
        assert len(in_line) == buffer.outstanding
        assert len(in_line) <= max(buffer.limits.capacity_groups, buffer.limits.batch_size)
        assert buffer.bytes_buffered == sum(s.parcel.nbytes for s in in_line if s.parcel)
        assert buffer.committed == buffer.made_uses + sum(reuse - s.uses for s in in_line)
        positions = [s.position for s in buffer.line]
        assert positions == sorted(positions)

    def teardown(self) -> None:
        """Whatever happened: if generators answer from now on and the trainer publishes, every step gets its batch."""
        if not hasattr(self, "buffer"):
            return
        while self.buffer.step < self.steps:
            for _ in range(200):
                self.publish()
                for seat in self.buffer.lease(2, owner="z", request=0, now=self.now):
                    self.buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version]))
                for seat in list(self.buffer.leased.values()):
                    self.buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version]))
                if self.try_step():
                    break
            else:
                raise AssertionError(f"step {self.buffer.step + 1} waits for ever")
            self.ledger_closes()
            if self.buffer.step not in self.batches or self.buffer.ended:
                break


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
