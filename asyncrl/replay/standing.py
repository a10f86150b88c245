"""Which process is the run's trainer, and what processes have announced: what outlives the server that was told.

Owned by `service.py`; kept by `journal.py`, and lost without one. Pure.
"""

from __future__ import annotations

import msgspec

from asyncrl.replay import messages
from asyncrl.replay.peers import NUMBERED, Peer, Peers

MAX_ANNOUNCED = 64
MAX_TRAINERS = 256
"""Former trainers that are remembered."""


class Standing(msgspec.Struct, kw_only=True):
    """What the journal keeps of it."""

    announced: dict[str, tuple[str, str]] = {}
    """key -> (value, incarnation of who announced it)."""
    trainers: list[str] = []
    """Processes that were the run's trainer; the last one is, and the others must end."""

    def announce(self, key: str, value: str, peer: Peer) -> None:
        """Raises ValueError when there are too many."""
        if len(self.announced) >= MAX_ANNOUNCED and key not in self.announced:
            raise ValueError(f"more than {MAX_ANNOUNCED} keys are announced")
        self.announced[key] = (value, peer.incarnation)

    def valid(self, peers: Peers) -> dict[str, str]:
        """Announcements of processes that this server has heard: after a restart, nobody is sent to a dead address."""
        return {key: value for key, (value, who) in self.announced.items() if who in peers.known}

    def begin(self, peer: Peer, peers: Peers) -> None:
        """`peer` is of a trainer that starts: announcements are void, and of a former one that lives on, or wakes up,
        nothing is accepted any more. A process has several connections."""
        self.announced = {}
        former = peers.take_over(peer)
        known = [*self.trainers, *(p.process for p in former), peer.process]
        self.trainers = list(dict.fromkeys(known))[-MAX_TRAINERS:]

    def refusal(self, peer: Peer, body: messages.Request, *, kept: bool) -> str:
        """Why nothing is accepted of `peer`; "" when it is. `kept`: the server goes on where a former one ended."""
        if peer.replaced or (_leads(peer) and peer.process in self.trainers[:-1]):
            return why_replaced(peer)
        told = peer.greeted or peer.process in self.trainers or isinstance(body, messages.Hello)
        if _leads(peer) and not (kept or told):
            return (
                "this replay server was started after this trainer and has no journal, so what the run had is lost: "
                "resume it from its checkpoint"
            )
        return ""


def why_replaced(peer: Peer) -> str:
    if peer.role not in NUMBERED:
        return f"another {peer.name} has started from a checkpoint and has taken over this run: this one must end"
    who = peer.successor or "another process"
    return f"{who} is {peer.name} now and this one, which was silent, is not: give every {peer.role} its own --index"


def why_taken(owner: Peer, now: float) -> str:
    """For a newcomer that asks for the place of `owner`, which lives."""
    return (
        f"{owner.name} is {owner.whereabouts}, heard {now - owner.last_heard:.0f} s ago: give every {owner.role} its "
        "own --index; this one is free once that process has ended"
    )


def _leads(peer: Peer) -> bool:
    """Of several trainer ranks one takes and publishes."""
    return peer.role == "trainer" and peer.index == 0
