"""The ledger: every group that was started is trained, buffered, in flight or dropped for a named reason.

Kept by `buffer.py`, which knows what is buffered and in flight from its own structures; the counters here are what
cannot be seen there any more. So `balance` compares two accounts, and it is zero unless something was lost.
"""

from __future__ import annotations

from math import isfinite

import msgspec


class Account(msgspec.Struct, kw_only=True):
    """One account, in groups or in tokens."""

    started: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}

    def drop(self, reason: str, amount: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + amount

    def entries(self, *, buffered: int, in_flight: int) -> dict[str, int]:
        """The closed account. `balance` is 0 when nothing is lost."""
        dropped = sum(self.dropped.values())
        return {
            "started": self.started,
            "trained": self.trained,
            "buffered": buffered,
            "in_flight": in_flight,
            "dropped": dropped,
            "balance": self.started - self.trained - buffered - in_flight - dropped,
        }


class Ledger(msgspec.Struct, kw_only=True):
    """Groups, and tokens. Tokens of a lease are started when it ends, since nobody knows them before."""

    groups: Account = msgspec.field(default_factory=Account)
    tokens: Account = msgspec.field(default_factory=Account)


class Means(msgspec.Struct, kw_only=True):
    """Running means of length and reward, to show what dropping does to the data."""

    num: int = 0
    length: float = 0.0
    reward: float = 0.0

    def add(self, *, length: float, reward: float) -> None:
        """Ignores what the sender did not know (NaN)."""
        if isfinite(length) and isfinite(reward):
            self.num += 1
            self.length += (length - self.length) / self.num
            self.reward += (reward - self.reward) / self.num
