"""One process as `asyncrl status` shows it. Pure: from the server's state. Used by `service.py`."""

from __future__ import annotations

from typing import Any

from asyncrl.replay import ranks
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.peers import Peer, Peers


def describe(peer: Peer, peers: Peers, buffer: Buffer, now: float) -> dict[str, Any]:
    """Who it is, when it was heard last, and what it does."""
    held = [s for s in buffer.leased.values() if s.owner == peer.incarnation]
    return {
        "role": peer.role,
        "index": peer.index,
        "pid": peer.pid,
        "host": peer.host,
        "heard_s": now - peer.last_heard,
        "silent": peer.silent,
        "leases": len(held),
        "oldest_lease_s": max((now - s.granted_at for s in held), default=0.0),
        "tokens_per_s": peer.pace.tokens_per_s,
        "busy": peer.pace.busy,
        "ready": peer.pace.latest.get("ready", float(peer.role != "reference")) > 0,
        "does": ranks.does(peer, peers, now),
    }
