"""The replay buffer: leases, admission, batches and the ledger. Pure state: no sockets, no clock, no threads.

Called by `service.py` alone; the time is an argument (monotonic seconds). It never waits: what cannot be answered yet
is None or an empty list, and the caller asks again after the next change.

Every admitted prompt has a seat in the line, in the order of the prompts. A lease that expires (or is `aborted`) leaves
its seat in place, and the prompt is leased again before any new one, without new admission; a drop removes the seat and
gives its admission back. `limiter.py` proves what this bounds.

End of data: when the environment has no more prompts and nothing is in flight, what is left cannot fill a batch: `take`
returns [], the trainer ends, and the groups of the incomplete batch stay counted as buffered.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan

from asyncrl.curriculum import Curriculum
from asyncrl.replay.ledger import Ledger, Means, refuse_endless
from asyncrl.replay.limiter import Limits
from asyncrl.replay.line import Changes, Line, Seat
from asyncrl.replay.parcel import Parcel
from asyncrl.replay.samplers import Sampler, oldest_first
from asyncrl.replay.staleness import refuse_too_old
from asyncrl.types import NOT_SAMPLED, Prompt

AGAIN = frozenset({"aborted", "expired"})
"""Ends of a lease that are not the prompt's fault: it is leased again, until it has been leased MAX_ATTEMPTS times."""
MAX_ATTEMPTS = 5
TAKES_KEPT = 2
"""Steps whose groups can be asked for again: the trainer may retry one while it prefetches the next."""
LEASES_REMEMBERED = 4096
"""Used-up leases whose insert is still answered with yes when it is repeated."""


@dataclass(slots=True, kw_only=True)
class Buffer:
    """The whole state. `prompts` yields the prompt with id `cursor` next, or a later one."""

    limits: Limits
    prompts: Iterator[Prompt]
    sampler: Sampler = oldest_first
    lease_timeout_s: float = 600.0
    """A lease that is not renewed for this long expires."""
    max_lease_s: float = 1800.0
    """A lease expires after this long even when it is renewed: its generator has forgotten it."""
    curriculum: Curriculum | None = None
    """Told how each group fared."""
    cursor: int = 0
    """Id of the next new prompt."""
    next_lease: int = 0
    step: int = 0
    """The last step taken."""
    made_uses: int = 0
    partial_uses: int = 0
    """Uses made of groups that have some left."""
    live_version: int = NOT_SAMPLED
    """The version on the generators; -1 before the first publish."""
    least_version: int = 0
    """The version that the trainer resumed with: nothing older goes live."""
    live_uses: int = 0
    """Uses made up to the step whose version is live: the limiter's `trained`."""
    uses_by_step: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Uses made up to the end of each step from the live one on."""
    exhausted: bool = False
    """The environment has no more prompts."""
    finished: str | None = None
    """Why no more leases are granted."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Drops by reason since the last accepted insert."""
    line: Line = field(default_factory=Line)
    leased: dict[int, Seat] = field(default_factory=dict)
    buffered: dict[int, Seat] = field(default_factory=dict)
    """Seats by lease id."""
    waiting: list[int] = field(default_factory=list)
    """Heap of positions that are leased again next."""
    recent: dict[int, list[Parcel]] = field(default_factory=dict)
    """What the last steps took, for a take that is asked again."""
    used_leases: dict[int, None] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    trained_means: Means = field(default_factory=Means)
    dropped_means: Means = field(default_factory=Means)
    bytes_buffered: int = 0
    tokens_buffered: int = 0
    largest_bytes: int = 0
    changes: Changes = field(default_factory=Changes)

    # Leases

    def room(self) -> int:
        """Leases that may be granted now: seats that wait for another attempt, then new prompts."""
        if self.live_version < 0 or self.finished is not None:
            return 0
        excess = self.committed - self.limits.allowed(trained=self.live_uses)  # above 0 only after a rewind
        again = len(self.waiting) - self.line.held_back(excess, reuse=self.limits.reuse)
        if self.exhausted:
            return again
        admitted = self.limits.room(trained=self.live_uses, committed=self.committed)
        return again + min(admitted, self._capacity_room())

    def share(self, owner: str, *, num_owners: int) -> int:
        """Leases that `owner` may get now, so that none is left idle: what it lacks to an equal part of all, at least
        its part of the free ones."""
        room, held = self.room(), sum(seat.owner == owner for seat in self.leased.values())
        return max(-(-(room + len(self.leased)) // num_owners) - held, -(-room // num_owners))

    def lease(self, n: int, *, owner: str, request: int, now: float) -> list[Seat]:
        """Up to `n` leases for one generator; [] when there is no room now."""
        granted: list[Seat] = []
        for _ in range(min(n, self.room())):  # each takes one of them
            if (seat := self._next_seat()) is None:
                break
            self._grant(seat, owner=owner, request=request, now=now)
            granted.append(seat)
        return granted

    def insert(self, lease_id: int, parcel: Parcel) -> bool:
        """The lease's group. False: the lease had expired and the group is ignored. Repeating it changes nothing."""
        if lease_id in self.buffered or lease_id in self.used_leases:
            return True
        seat = self.leased.get(lease_id)
        if seat is None:
            return False
        if NOT_SAMPLED < parcel.oldest_version < seat.version:
            # The bound rests on every token being as new as its lease. A generator that serves older weights is out of
            # step; what it made must not reach the trainer, and another attempt gets the prompt.
            self._end_without_group(seat, "stale", parcel.num_tokens)
            self._lease_again(seat, "stale")
            return False
        self._store(seat, parcel)
        if self.curriculum is not None:
            self.curriculum.feedback(seat.prompt, parcel.reward)
        return True

    def drop(
        self, lease_id: int, reason: str, *, num_tokens: int = 0, reward: float = nan, length: float = nan
    ) -> bool:
        """The lease ends without a group. False: it had expired. Raises EndlessRejection."""
        if (seat := self.leased.get(lease_id)) is None:
            return False
        self._end_without_group(seat, reason, num_tokens)
        if reason in AGAIN:
            self._lease_again(seat, reason)
            return True
        self.dropped_means.add(length=length, reward=reward)
        if self.curriculum is not None and reason == "filtered":
            self.curriculum.feedback(seat.prompt, reward)
        self._remove(seat)
        self._reject(reason)
        return True

    def renew(self, owner: str, held: set[int], *, acked: int, now: float) -> None:
        """The owner works on `held`. A lease whose grant reached it and which it does not hold is lost: it expires."""
        for seat in self._leases_of(owner):
            if seat.lease_id in held:
                seat.renewed_at = now
            elif seat.request < acked:
                self._expire(seat)

    def expire(self, now: float) -> int:
        """End the leases that were not renewed in time or are too old altogether. Returns how many."""
        timeout, most = self.lease_timeout_s, self.max_lease_s
        late = [s for s in self.leased.values() if now - s.renewed_at > timeout or now - s.granted_at > most]
        for seat in late:
            self._expire(seat)
        return len(late)

    def release(self, owner: str) -> int:
        """The owner is gone: its leases expire. Returns how many."""
        lost = self._leases_of(owner)
        for seat in lost:
            self._expire(seat)
        return len(lost)

    def finish(self, reason: str) -> None:
        """Grant no more leases."""
        self.finished = self.finished or reason

    def seat_in(self, seat: Seat) -> None:
        """Put a seat back where it was when the journal wrote it. Seats come in order."""
        self.line.append(seat)
        if seat.used_up:
            self.used_leases[seat.lease_id] = None
        elif seat.parcel is not None:
            self._shelve(seat, seat.parcel)
            self.partial_uses += seat.uses
        elif seat.owner:
            self.leased[seat.lease_id] = seat
        else:
            heapq.heappush(self.waiting, seat.position)

    # Batches

    def publish(self, *, version: int, step: int) -> None:
        """`version`, made by training `step`, is live on the generators: leases for later steps are admitted."""
        if version < max(self.live_version, self.least_version):
            former = max(self.live_version, self.least_version)
            raise ValueError(f"version {version} cannot go live after version {former}")
        if step > self.step:
            raise ValueError(f"version {version} cannot come from step {step}: only {self.step} steps were taken")
        self.live_version = version
        self.live_uses = max(self.live_uses, self.uses_by_step.get(step, 0))
        for old in [s for s in self.uses_by_step if s < step]:
            del self.uses_by_step[old]

    def take(self, *, step: int, num_groups: int, version: int) -> list[Parcel] | None:
        """The groups of `step`, by place in line; None: not yet; []: the data has ended. The same step gets the same.

        Raises ValueError for a step out of turn and StalenessExceeded when a group is older than the bound.
        """
        if step in self.recent:
            return self.recent[step]
        if step != self.step + 1:
            raise ValueError(
                f"step {step} cannot be taken after step {self.step}; a resumed trainer calls rewind first"
            )
        if num_groups != self.limits.batch_size:
            raise ValueError(
                f"a batch has {self.limits.batch_size} groups (training.batch_size), asked for {num_groups}"
            )
        if self.limits.window is None:
            self._drop_stale(version)
        seats = self._choose(step)
        if seats is None:
            return [] if self.ended else None
        for seat in seats:
            refuse_too_old(seat, version=version, max_lag=self.limits.max_lag)
        return self._consume(seats, step)

    @property
    def ended(self) -> bool:
        """Nothing is in flight and nothing will be: no further group arrives."""
        return not self.leased and (self.finished is not None or (self.exhausted and not self.waiting))

    @property
    def over(self) -> bool:
        """No lease will ever be granted again."""
        return self.finished is not None or (self.exhausted and not self.waiting and not self.leased)

    # Accounts

    @property
    def outstanding(self) -> int:
        """Seats that are not used up."""
        return len(self.waiting) + len(self.leased) + len(self.buffered)

    @property
    def committed(self) -> int:
        """Uses that admission has spent: made ones, and those promised to outstanding seats."""
        return self.made_uses + self.outstanding * self.limits.reuse - self.partial_uses

    def accounts(self) -> dict[str, float]:
        """The ledger in groups and in tokens, and the drops by reason."""
        buffered, in_flight = len(self.buffered), len(self.leased)
        return self.ledger.report(buffered=buffered, in_flight=in_flight, tokens_buffered=self.tokens_buffered)

    # Inside

    def _capacity_room(self) -> int:
        """New prompts that capacity allows. Every lease in flight is expected to need as much as the largest group so
        far; the first batch is never held back, or nothing would ever be trained."""
        limits, outstanding = self.limits, self.outstanding
        room = limits.capacity_groups - outstanding
        if self.largest_bytes:
            expected = self.bytes_buffered + (outstanding - len(self.buffered)) * self.largest_bytes
            room = min(room, (limits.capacity_bytes - expected) // self.largest_bytes)
        return max(room, limits.batch_size - outstanding, 0)

    def _next_seat(self) -> Seat | None:
        if self.waiting:
            return self.line.seats[heapq.heappop(self.waiting)]
        prompt = next(self.prompts, None)
        if prompt is None:
            self.exhausted = True
            if self.curriculum is not None:  # what it skipped at the end is not looked at again by a resumed run
                self.cursor = max(self.cursor, self.curriculum.seen)
            return None
        if prompt.id < self.cursor or (self.curriculum is None and prompt.id != self.cursor):
            raise ValueError(f"Env.prompts must yield ids in order: expected {self.cursor}, got {prompt.id}")
        seat = Seat(position=prompt.id, prompt=prompt, attempt=-1)  # a curriculum may have skipped some
        self.cursor = prompt.id + 1
        self.line.append(seat)
        return seat

    def _grant(self, seat: Seat, *, owner: str, request: int, now: float) -> None:
        seat.lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        seat.attempt += 1
        seat.owner, seat.request, seat.version = owner, request, self.live_version
        seat.granted_at = seat.renewed_at = now
        self.leased[seat.lease_id] = seat
        self.ledger.groups.started += 1
        self.changes.add(seat)

    def _store(self, seat: Seat, parcel: Parcel) -> None:
        del self.leased[seat.lease_id]
        seat.parcel, seat.num_tokens, seat.owner = parcel, parcel.num_tokens, ""
        self._shelve(seat, parcel)
        self.ledger.tokens.started += parcel.num_tokens
        self.largest_bytes = max(self.largest_bytes, parcel.nbytes)
        self.rejected.clear()
        self.changes.add(seat)
        self.changes.arrived[seat.position] = parcel

    def _shelve(self, seat: Seat, parcel: Parcel) -> None:
        self.buffered[seat.lease_id] = seat
        self.bytes_buffered += parcel.nbytes
        self.tokens_buffered += parcel.num_tokens

    def _end_without_group(self, seat: Seat, reason: str, num_tokens: int) -> None:
        del self.leased[seat.lease_id]
        seat.owner = ""
        self.ledger.groups.drop(reason, 1)
        self.ledger.tokens.started += num_tokens
        self.ledger.tokens.drop(reason, num_tokens)
        self.changes.add(seat)

    def _expire(self, seat: Seat) -> None:
        self._end_without_group(seat, "expired", 0)
        self._lease_again(seat, "expired")

    def _lease_again(self, seat: Seat, reason: str) -> None:
        if seat.attempt + 1 < MAX_ATTEMPTS:
            heapq.heappush(self.waiting, seat.position)
            return
        # A prompt that has cost several generators their lease may be what kills them.
        self._remove(seat)
        self._reject(reason)

    def _reject(self, reason: str) -> None:
        self.rejected[reason] += 1
        refuse_endless(self.rejected, self.limits.max_rejected)

    def _remove(self, seat: Seat) -> None:
        self.line.remove(seat)
        seat.removed = True
        self.changes.add(seat)

    def _leases_of(self, owner: str) -> list[Seat]:
        return [s for s in self.leased.values() if s.owner == owner]

    def _choose(self, step: int) -> list[Seat] | None:
        limits = self.limits
        if len(self.buffered) < limits.batch_size:
            return None
        return self.line.choose(step=step, num_groups=limits.batch_size, window=limits.window, sampler=self.sampler)

    def _consume(self, seats: list[Seat], step: int) -> list[Parcel]:
        parcels = [seat.parcel for seat in seats if seat.parcel is not None]
        for seat, parcel in zip(seats, parcels, strict=True):
            seat.uses += 1
            seat.last_step = step
            self.changes.uses.append((step, seat.position))
            self.made_uses += 1
            self.partial_uses += 1
            self.trained_means.add(length=parcel.length, reward=parcel.reward)
            self.changes.add(seat)
            if seat.uses == self.limits.reuse:
                self._use_up(seat)
        self.step = step
        self.uses_by_step[step] = self.made_uses
        self.recent[step] = parcels
        self.recent.pop(step - TAKES_KEPT, None)
        return parcels

    def _use_up(self, seat: Seat) -> None:
        tokens = self._unshelve(seat).num_tokens
        self.ledger.groups.trained += 1
        self.ledger.tokens.trained += tokens
        self.line.use_up(seat)
        self.used_leases[seat.lease_id] = None
        if len(self.used_leases) > LEASES_REMEMBERED:
            del self.used_leases[next(iter(self.used_leases))]

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.limits.max_lag
        for seat in [s for s in self.buffered.values() if NOT_SAMPLED < s.oldest_version < oldest]:
            if seat.uses:  # it has been trained on; only its remaining uses are given up
                self._use_up(seat)
                continue
            parcel = self._unshelve(seat)
            self.ledger.groups.drop("stale", 1)
            self.ledger.tokens.drop("stale", parcel.num_tokens)
            self.dropped_means.add(length=parcel.length, reward=parcel.reward)
            seat.parcel = None
            self._remove(seat)

    def _unshelve(self, seat: Seat) -> Parcel:
        parcel = seat.parcel
        assert parcel is not None
        del self.buffered[seat.lease_id]
        self.partial_uses -= seat.uses
        self.bytes_buffered -= parcel.nbytes
        self.tokens_buffered -= parcel.num_tokens
        self.changes.add(seat)
        return parcel
