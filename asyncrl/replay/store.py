"""Where the server's groups are: in memory, or in files of generators on its host.

Used by `service.py`; without `files` everything comes and goes through the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from asyncrl.replay import messages, wire
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.parcel import Parcel, parcel_of
from asyncrl.replay.peers import Peers
from asyncrl.replay.seal import Payload
from asyncrl.replay.spool import Files, Key


@dataclass(slots=True, kw_only=True)
class Store:
    """The files, and who still needs them."""

    files: Files | None = None
    recorded: Callable[[], Set[Key]] = frozenset
    """Segments that the journal refers to."""
    share: bool = True
    """False: nobody leaves groups there any more; what was left is swept."""

    @property
    def offer(self) -> messages.Offer | None:
        return self.files.offer if self.files is not None and self.share else None

    def parcel(self, incarnation: str, body: messages.Insert, payload: Payload) -> Parcel:
        """The group of an insert, checked. Raises ValueError."""
        place = body.place
        if place is None:
            parcel = parcel_of(payload.frames, payload.digests)
        elif self.files is None or not self.share or place.owner != incarnation:
            raise ValueError("a group may lie in a file of its sender, in the folder that this server has offered")
        else:
            parcel = parcel_of(self.files.read(place), place.digests, place)
        if parcel.lease_id != body.lease_id:
            raise ValueError(f"the group is of lease {parcel.lease_id}, the request of lease {body.lease_id}")
        return parcel

    def frames(self, parcel: Parcel) -> Sequence[wire.Frame]:
        """Header and body. Raises RuntimeError when somebody has taken away a file that was in use."""
        if parcel.place is None:
            return parcel.frames
        assert self.files is not None
        try:
            return self.files.read(parcel.place)
        except ValueError as error:
            raise RuntimeError(f"a group that was accepted is gone from {self.files.offer.folder}: {error}") from error

    def unused(self, incarnation: str, segments: Sequence[int], buffer: Buffer, peers: Peers) -> list[int]:
        """Those of an owner's segments to which nothing refers."""
        used = self._used(buffer, peers)
        free = [s for s in segments if (incarnation, s) not in used]
        if self.files is not None:
            self.files.release(incarnation)
        return free

    def sweep(self, buffer: Buffer, peers: Peers) -> None:
        """Delete what generators that are gone have left and nobody needs."""
        if self.files is not None:
            self.files.sweep(self._used(buffer, peers), peers.is_alive)

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def _used(self, buffer: Buffer, peers: Peers) -> Set[Key]:
        """Segments with groups that are buffered, recorded, or in a batch that may be asked for again."""
        parcels = [*buffer.changes.arrived.values(), *peers.lent()]
        parcels += [seat.parcel for seat in buffer.buffered.values() if seat.parcel is not None]
        parcels += [parcel for batch in buffer.recent.values() for parcel in batch]
        return {(p.place.owner, p.place.segment) for p in parcels if p.place is not None} | self.recorded()
