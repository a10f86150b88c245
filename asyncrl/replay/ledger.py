"""The ledger: every group that was started is trained, buffered, in flight or dropped for a named reason.

Kept by `buffer.py`, which knows what is buffered and in flight from its own structures; the counters here are what
cannot be seen there any more. So `balance` compares two accounts, and it is zero unless something was lost.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite

import msgspec

MAX_REASONS = 64
"""Reasons that are counted by name; a client with more of them fills one more."""
FEW = 32
"""Failures in a row that never end a run whose limit is higher."""

REMEDIES = {
    "filtered": "all responses to a prompt got the same reward, so the task is too hard or too easy for this model; "
    "try other prompts, a reward with parts, or supervised training first (`asyncrl sft`)",
    "stale": "they were sampled from weights older than their lease; the generators' logs say why no newer ones came",
    "too_long": "raise training.seq_len, or make prompts and generation.max_tokens shorter",
    "reward_timeout": "make the reward faster, or raise generation.reward_timeout_s",
    "rollout_timeout": "make the rollout faster, or raise generation.rollout_timeout_s",
}
FAILED = "the environment or its reward fails; `asyncrl envs check NAME` tries it without a run"
"""What may be done when a reason ends nearly all groups; any other reason is a failure."""


class Account(msgspec.Struct, kw_only=True):
    """One account, in groups or in tokens."""

    started: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}

    def drop(self, reason: str, amount: int) -> None:
        if len(self.dropped) >= MAX_REASONS and reason not in self.dropped:
            reason = "other"
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

    def report(self, *, buffered: int, in_flight: int, tokens_buffered: int) -> dict[str, float]:
        """Both accounts, closed, and the drops by reason, under the names of the metrics."""
        groups = self.groups.entries(buffered=buffered, in_flight=in_flight)
        tokens = self.tokens.entries(buffered=tokens_buffered, in_flight=0)
        return (
            {f"ledger/{k}": float(v) for k, v in groups.items()}
            | {f"ledger_tokens/{k}": v for k, v in tokens.items()}
            | {f"dropped/{k}": v for k, v in self.groups.dropped.items()}
        )


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


class EndlessRejection(RuntimeError):
    """So many leases in a row ended without a group that waiting longer is pointless."""


def refuse_endless(rejected: Counter[str], limit: int) -> None:
    """Raise EndlessRejection when `limit` leases in a row, counted by reason, ended without a group, or a tenth of it
    by failures: those are not chance, and a user should hear of them soon."""
    failed = rejected.total() - rejected["filtered"]
    if rejected.total() < limit and failed < max(limit // 10, min(limit, FEW)):
        return
    reasons = ", ".join(f"{n} {r}" for r, n in rejected.most_common())
    remedy = REMEDIES.get(rejected.most_common(1)[0][0], FAILED)
    raise EndlessRejection(
        f"{rejected.total()} leases in a row ended without a group to train on ({reasons}): {remedy}. "
        "replay.max_filtered sets how many batches' worth is too many"
    )
