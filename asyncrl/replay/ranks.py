"""Which ranks of the trainer are not heard from, and whether the others wait for them. Pure: from the peers' beats.

Each rank says from a thread of its own that it lives and what it does (training/pulse.py), so a beat does not depend on
the collective that the rank may be stuck in. Used by `service.py` for the answer to a beat and for `status()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.replay import messages
from asyncrl.replay.peers import Peer, Peers

NAMED = 4
"""At most so many silent ranks are named."""


def missing(peers: Peers, now: float, *, silent_s: float) -> messages.Missing:
    """The ranks not heard from for `silent_s`, in one line; for how long the others have not got on without them."""
    ranks = _by_index(peers)
    if not ranks:
        return messages.Missing()
    size = _size(peers, ranks)
    began = min(p.first_heard for p in ranks.values())
    gone = {p.index for p in peers.known.values() if p.left and p.beat is not None and p.last_heard >= began}
    silences = {i: now - (ranks[i].last_heard if i in ranks else began) for i in range(size) if i not in gone}
    silent = {i: s for i, s in silences.items() if s > silent_s}
    if not silent:
        return messages.Missing()
    heard = [ranks[i] for i in silences if i not in silent]
    still_s = min((_still_s(p, now) for p in heard), default=min(silences.values()))
    waits = bool(heard) and still_s > silent_s / 2
    why = _say(silent, ranks, size=size, waits=waits)
    return messages.Missing(why=why, for_s=min(still_s, max(silent.values())))


def waiting(peers: Peers, now: float, *, silent_s: float) -> list[dict[str, Any]]:
    """The same as a line of `status()["waiting"]`; none when every rank is heard."""
    found = missing(peers, now, silent_s=silent_s)
    return [{"who": "trainer", "for_s": found.for_s, "why": found.why, "silent": True}] if found.why else []


def does(peer: Peer, peers: Peers, now: float) -> str:
    """ "trains step 5 for 45 s": of a process, which may have several connections. "" when it has never said."""
    said = [p for p in peers.known.values() if p.process == peer.process and p.beat is not None and p.beat.does]
    return f"{said[0].beat.does} for {_still_s(said[0], now):.0f} s" if said and said[0].beat is not None else ""


def _by_index(peers: Peers) -> Mapping[int, Peer]:
    """Of each rank the connection that was heard last, with what its process said last of itself."""
    heard = sorted((p for p in peers.in_service("trainer") if p.beat is not None), key=lambda p: p.last_heard)
    return {p.index: p for p in heard}


def _size(peers: Peers, ranks: Mapping[int, Peer]) -> int:
    """Of the trainer that was heard last: another one, with fewer ranks, may have taken its place."""
    latest = max(ranks.values(), key=lambda p: p.last_heard)
    assert latest.beat is not None
    return latest.beat.size


def _still_s(peer: Peer, now: float) -> float:
    """How long it has done what it does."""
    assert peer.beat is not None
    return peer.beat.for_s + now - peer.beat_at


def _say(silent: Mapping[int, float], ranks: Mapping[int, Peer], *, size: int, waits: bool) -> str:
    named = [_name(i, ranks.get(i), of_many=size > 1, silent_s=s) for i, s in list(silent.items())[:NAMED]]
    more = f", and {len(silent) - NAMED} more ranks" if len(silent) > NAMED else ""
    return f"trainer {'waits for ' if waits else ''}{', '.join(named)}{more}"


def _name(index: int, peer: Peer | None, *, of_many: bool, silent_s: float) -> str:
    if peer is None or peer.beat is None:
        return f"rank {index}, not heard from at all for {silent_s:.0f} s"
    where = f"host {peer.beat.host}, pid {peer.beat.pid}"
    who = f"rank {index} ({where})" if of_many else f"({where})"
    return f"{who}, not heard from for {silent_s:.0f} s"
