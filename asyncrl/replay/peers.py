"""Who talks to the replay server: one Peer per incarnation of a process, with the replies it has not acknowledged.

Used by `service.py`. Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.fingerprint import differences
from asyncrl.replay import wire
from asyncrl.replay.messages import Beat, Hello
from asyncrl.replay.parcel import Parcel

REPLIES_KEPT = 1024
"""Unacknowledged replies per peer; a client has far fewer requests open at once."""
MAX_PEERS = 4096
NUMBERED = ("generator", "reference")
"""Roles of which there are several: a newcomer takes the place of a former one with its index."""


@dataclass(slots=True)
class Pace:
    """What a generator did between two looks, from its cumulative counters."""

    latest: dict[str, float] = field(default_factory=dict)
    latest_at: float = 0.0
    mark: dict[str, float] = field(default_factory=dict)
    mark_at: float = 0.0
    busy: float = 0.0
    """Fraction of the time in which some request was running."""
    tokens_per_s: float = 0.0

    def report(self, activity: dict[str, float], now: float) -> None:
        self.latest, self.latest_at = activity, now
        if not self.mark_at:
            self.mark, self.mark_at = activity, now

    def look(self) -> None:
        """Measure from the last look to the latest report, if there is a newer one."""
        elapsed = self.latest_at - self.mark_at
        if elapsed <= 0:
            return
        self.busy = min(1.0, max(0.0, self._rise("busy_s") / elapsed))
        self.tokens_per_s = max(0.0, self._rise("tokens") / elapsed)
        self.mark, self.mark_at = self.latest, self.latest_at

    def _rise(self, key: str) -> float:
        return self.latest.get(key, 0.0) - self.mark.get(key, 0.0)


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of one process."""

    incarnation: str
    identity: bytes
    """Where its socket can be reached: the routing id of its latest message."""
    first_heard: float
    last_heard: float
    role: str = "unknown"
    index: int = 0
    pid: int = 0
    host: str = ""
    acked: int = 0
    replies: dict[int, list[wire.Frame]] = field(default_factory=dict)
    lent: dict[int, Sequence[Parcel]] = field(default_factory=dict)
    """The groups that such replies speak of."""
    greeted: bool = False
    """It has said hello to this server, not to a former one."""
    replaced: bool = False
    """Another incarnation of the same role and index has said hello."""
    successor: str = ""
    """Who that is."""
    claims: bool = False
    """It has said hello, and whether a former one with its index is dead is not known yet."""
    left: bool = False
    """It has said goodbye."""
    silent: bool = False
    """Not heard from for `supervise.dead_after_s`: its leases were freed."""
    pace: Pace = field(default_factory=Pace)
    waits: str = ""
    """What it says it waits for, elsewhere than here."""
    waits_since: float = 0.0
    beat: Beat | None = None
    """What a trainer rank last said of itself."""
    beat_at: float = 0.0

    @property
    def name(self) -> str:
        if self.role == "trainer" and self.index:
            return f"trainer rank {self.index}"
        return f"{self.role} {self.index}" if self.role in NUMBERED else self.role

    @property
    def whereabouts(self) -> str:
        """ "process 4711 on host h2": a server that was restarted knows it of newcomers only."""
        return f"process {self.pid} on host {self.host}" if self.pid else "another process"

    @property
    def process(self) -> str:
        """What all connections of one process have in common."""
        return self.incarnation[: wire.PROCESS_DIGITS]

    def wait_for(self, what: str, now: float) -> None:
        """It waits for `what` elsewhere; "" ends the wait."""
        self.waits_since = self.waits_since if self.waits and what else now
        self.waits = what

    def acknowledge(self, acked: int) -> None:
        """Replies below `acked` will not be asked for again."""
        if acked > self.acked:
            self.acked = acked
            for seq in [s for s in self.replies if s < acked]:
                self._forget(seq)

    def remember(self, seq: int, frames: list[wire.Frame], parcels: Sequence[Parcel]) -> None:
        self.replies[seq] = frames
        if parcels:
            self.lent[seq] = parcels
        if len(self.replies) > REPLIES_KEPT:
            self._forget(next(iter(self.replies)))

    def _forget(self, seq: int) -> None:
        del self.replies[seq]
        self.lent.pop(seq, None)


@dataclass(slots=True)
class Peers:
    """All of them, by incarnation."""

    known: dict[str, Peer] = field(default_factory=dict)
    run: Mapping[str, str] = field(default_factory=dict)
    """The fingerprint of this run's configuration."""

    def hear(self, envelope: wire.Envelope, identity: bytes, now: float) -> Peer:
        """The sender of a message, new or known. Raises ValueError when there are too many."""
        peer = self.known.get(envelope.incarnation)
        if peer is None:
            if len(self.known) >= MAX_PEERS:
                raise ValueError(f"more than {MAX_PEERS} processes talk to this server")
            peer = Peer(incarnation=envelope.incarnation, identity=identity, first_heard=now, last_heard=now)
            self.known[envelope.incarnation] = peer
        peer.identity, peer.last_heard, peer.silent = identity, now, False
        peer.role, peer.index = envelope.role, envelope.index
        peer.acknowledge(envelope.acked)
        return peer

    def introduce(self, peer: Peer, hello: Hello) -> list[Peer]:
        """`peer` says who it is. Returns those whose place it takes. Raises ValueError when it is another run's."""
        if differ := differences(self.run, hello.run):
            raise ValueError(
                f"this {peer.name} belongs to another run than this server: {', '.join(differ)} differ in its "
                "config.yaml; give it this run's folder (--run-dir), or its own server's address (--address)"
            )
        peer.pid, peer.host, peer.greeted = hello.pid, hello.host, True
        if peer.role == "trainer" and peer.index:  # rank 0 takes over when it rewinds
            return self.take_over(peer)
        if peer.role not in NUMBERED:
            return []
        former = [p for p in self.in_service(peer.role) if p.index == peer.index and p is not peer]
        for other in former:
            other.replaced, other.successor = True, peer.whereabouts
        return former

    def owner(self, peer: Peer) -> Peer | None:
        """Another process that has the role and index which `peer` asks for, the one heard last."""
        if peer.role not in NUMBERED:
            return None
        others = [p for p in self.in_service(peer.role) if p.index == peer.index and p.process != peer.process]
        return max((p for p in others if not p.claims), key=lambda p: p.last_heard, default=None)

    def beat(self, peer: Peer, beat: Beat, now: float) -> None:
        """A trainer rank says what it does. Nobody waits for ranks that only a former, larger trainer had."""
        peer.beat, peer.beat_at = beat, now
        if peer.index == 0:
            for other in self.in_service("trainer"):
                other.replaced = other.silent and other.index >= beat.size

    def is_rank(self, peer: Peer) -> bool:
        """Whether it is a trainer rank that has not said goodbye: it is remembered, however long it is silent."""
        return peer.beat is not None and not peer.replaced

    def take_over(self, peer: Peer) -> list[Peer]:
        """The process of `peer` takes the place of others of its role and index: which?"""
        same = [p for p in self.in_service(peer.role) if p.index == peer.index]
        former = [p for p in same if p.process != peer.process]
        for other in former:
            other.replaced = True
        return former

    def generators(self) -> Sequence[Peer]:
        """Generators in service or silent, by index; replaced ones left out."""
        return self.in_service("generator")

    def in_service(self, role: str) -> Sequence[Peer]:
        """Processes of one role, by index; replaced ones left out."""
        found = [p for p in self.known.values() if p.role == role and not p.replaced]
        return sorted(found, key=lambda p: p.index)

    def processes(self) -> Sequence[Peer]:
        """One peer a process, the one heard last: a trainer has two connections. Replaced ones are left out."""
        heard = sorted((p for p in self.known.values() if not p.replaced), key=lambda p: p.last_heard)
        return list({(p.role, p.index, p.process): p for p in heard}.values())

    def waiting(self) -> Sequence[Peer]:
        """Who waits for something elsewhere and has not fallen silent since it said so."""
        return [p for p in self.known.values() if p.waits and not p.silent]

    def alive(self) -> Sequence[Peer]:
        return [p for p in self.generators() if not p.silent]

    def lent(self) -> Iterator[Parcel]:
        """The groups in replies that may be asked for again."""
        return (parcel for p in self.known.values() for parcels in p.lent.values() for parcel in parcels)

    def is_alive(self, incarnation: str) -> bool:
        peer = self.known.get(incarnation)
        return peer is not None and not peer.replaced and not peer.silent

    def num_alive(self) -> int:
        return sum(p.role == "generator" and not p.replaced and not p.silent for p in self.known.values())

    def remove(self, peer: Peer) -> None:
        self.known.pop(peer.incarnation, None)
