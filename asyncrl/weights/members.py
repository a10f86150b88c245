"""Who the receivers are, and what each last answered: the sender's view of the generators.

Pure: events in, members out. Owned by the thread that publishes. Never sends anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from asyncrl.weights.messages import Hello, ToTrainer


class Gone(msgspec.Struct, frozen=True):
    """The connection to a peer ended."""

    reason: str


Reply = ToTrainer | Gone


@dataclass(slots=True)
class Member:
    """One generator, from its hello until it is gone or dropped."""

    key: str
    """Its routing id; a restarted generator has another."""
    index: int
    incarnation: str
    num_ranks: int
    version: int
    """What it serves; -1: nothing that this trainer published."""
    agreed: str = ""
    """Digest of the plan that it has agreed to, and so knows."""
    heard: float = 0.0
    """When its latest message came (monotonic clock)."""


@dataclass(slots=True)
class Members:
    """All generators that said hello. `replies` holds what each answered in the present attempt, or that it is gone."""

    first: int = 0
    """The attempts of this trainer are numbered from here."""
    attempt: int = field(init=False)
    by_key: dict[str, Member] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attempt = self.first

    def begin_attempt(self) -> int:
        """The number of a new round of orders, to which no answers have come."""
        self.replies.clear()
        self.attempt += 1
        return self.attempt

    def behind(self, version: int | None) -> list[Member]:
        """Members that do not serve `version` (None: nothing was published yet, so all), in order of their index."""
        return sorted((m for m in self.by_key.values() if m.version != version), key=lambda m: (m.index, m.key))

    def apply(self, key: str, event: Reply, when: float) -> None:
        """Take in one event that came at `when`. A second hello of a known member updates its version, nothing else."""
        if isinstance(event, Hello):
            self._hello(key, event)
        elif key in self.by_key and (isinstance(event, Gone) or event.attempt == self.attempt):
            self.replies[key] = event
        if key in self.by_key:
            self.by_key[key].heard = when
        if isinstance(event, Gone):
            self.by_key.pop(key, None)

    def remove(self, key: str) -> None:
        """Forget a member until it says hello again."""
        self.by_key.pop(key, None)
        self.replies.pop(key, None)

    def _hello(self, key: str, hello: Hello) -> None:
        ours = self.first < hello.attempt <= self.attempt  # a former trainer's version may have been other weights
        version = hello.version if ours else -1
        known = self.by_key.get(key)
        if known is not None and known.num_ranks == hello.num_ranks:
            known.version = version
        else:
            self.by_key[key] = Member(key, hello.index, hello.incarnation, hello.num_ranks, version)
