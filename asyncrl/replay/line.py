"""The line: seats in the order of their prompts, and which of them make the next batch.

Used by `buffer.py`. A seat keeps its place from the first lease of its prompt until its group is used up and every
older one too, or until it is dropped. Pure state.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.replay.parcel import Parcel
from asyncrl.replay.samplers import Sampler, oldest_first
from asyncrl.types import NOT_SAMPLED, Prompt


@dataclass(slots=True, kw_only=True)
class Seat:
    """One admitted prompt's place in line: waiting to be leased again, leased, buffered or used up."""

    position: int
    """Order of first leases; equals the prompt's id."""
    prompt: Prompt
    attempt: int = 0
    """How often it was leased before the current lease."""
    lease_id: int = -1
    """Of the current lease, or of the one that inserted the group."""
    owner: str = ""
    """Incarnation that holds the lease; "" when nobody does."""
    request: int = 0
    """Sequence number of the owner's request that was answered with the lease."""
    granted_at: float = 0.0
    renewed_at: float = 0.0
    version: int = NOT_SAMPLED
    """Live when the lease was granted."""
    parcel: Parcel | None = None
    """The group, while it is buffered."""
    num_tokens: int = 0
    """Of the group, also after it is used up."""
    uses: int = 0
    last_step: int = 0
    """The last step that used it."""
    used_up: bool = False
    removed: bool = False
    """Dropped for good."""
    rewound: bool = False
    """Generated before a rewind, perhaps by a version that has not been made again yet."""
    stored: bool = False
    """The journal has its prompt."""

    @property
    def oldest_version(self) -> int:
        return self.parcel.oldest_version if self.parcel else NOT_SAMPLED

    @property
    def priority(self) -> float:
        return self.parcel.priority if self.parcel else 0.0


@dataclass(slots=True)
class Changes:
    """What happened since the journal last looked."""

    seats: dict[int, Seat] = field(default_factory=dict)
    """By position; removed ones included."""
    arrived: dict[int, Parcel] = field(default_factory=dict)
    """Groups by position, also when they have been used up since."""
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(step, position)."""

    def add(self, seat: Seat) -> None:
        self.seats[seat.position] = seat

    def clear(self) -> None:
        self.seats.clear()
        self.arrived.clear()
        self.uses.clear()


@dataclass(slots=True)
class Line:
    """Seats by position, ascending. The first one is always the anchor: the oldest that is not used up."""

    seats: dict[int, Seat] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self.seats.values())

    def append(self, seat: Seat) -> None:
        self.seats[seat.position] = seat

    def remove(self, seat: Seat) -> None:
        """The seat is dropped: those behind it move up."""
        del self.seats[seat.position]
        self.trim()

    def use_up(self, seat: Seat) -> None:
        """The seat's group had its last use. The seat goes on counting for the window until the anchor passes it."""
        seat.used_up, seat.parcel = True, None
        self.trim()

    def choose(self, *, step: int, num_groups: int, window: int | None, sampler: Sampler) -> list[Seat] | None:
        """The seats of a whole batch, by position; None when the window does not hold one yet.

        Picks one by one. The window covers `window` seats from the oldest that is neither used up nor picked for this
        batch; None covers everything.
        """
        if sampler is oldest_first:
            return self._choose_oldest(num_groups=num_groups, window=window)
        seats = list(self.seats.values())
        picked: set[int] = set()
        open_: list[tuple[float, int]] = []
        head = seen = 0
        while len(picked) < num_groups:
            while head < len(seats) and (seats[head].used_up or seats[head].position in picked):
                head += 1
            end = len(seats) if window is None else min(len(seats), head + window)
            for seat in seats[seen:end]:
                if seat.parcel is not None:
                    heapq.heappush(open_, (sampler(seat, step), seat.position))
            seen = max(seen, end)
            if not open_:
                return None
            picked.add(heapq.heappop(open_)[1])
        return [self.seats[p] for p in sorted(picked)]

    def _choose_oldest(self, *, num_groups: int, window: int | None) -> list[Seat] | None:
        """The same for the default order, without a heap: the window stands still at the first seat without a group."""
        chosen: list[Seat] = []
        end: int | None = None
        for i, seat in enumerate(self.seats.values()):
            if end is not None and i >= end:
                return None
            if seat.parcel is not None:
                chosen.append(seat)
                if len(chosen) == num_groups:
                    return chosen
            elif not seat.used_up and end is None and window is not None:
                end = i + window
        return None

    def held_back(self, excess: int, *, reuse: int) -> int:
        """Seats that wait for a lease among the last ones, which together promise `excess` uses too many."""
        held = 0
        for seat in reversed(self.seats.values()):
            if excess <= 0:
                break
            held += not (seat.owner or seat.parcel or seat.used_up)
            excess -= seat.uses if seat.used_up else reuse
        return held

    def trim(self) -> None:
        """Let go of used-up seats that the anchor has passed."""
        while self.seats and (first := next(iter(self.seats.values()))).used_up:
            del self.seats[first.position]
