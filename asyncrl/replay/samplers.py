"""In which order buffered groups are trained: a rank per candidate, lowest first.

Called by `buffer.py` for groups that the window allows. A sampler cannot break the staleness bound, only choose
within it; so each is one small function. Pure: chance comes from the step and the place in line, so asking twice
gives the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, Protocol

Order = Literal["window", "fifo", "freshest", "uniform", "priority"]


class Candidate(Protocol):
    """What a sampler sees of a buffered group."""

    position: int
    """Place in line: the order in which prompts were first leased."""

    @property
    def oldest_version(self) -> int: ...

    @property
    def priority(self) -> float:
        """Mean |reward - mean reward| of the siblings: |advantage| before any algorithm scales it."""
        ...


Sampler = Callable[[Candidate, int], float]
"""(candidate, optimiser step) -> rank; equal ranks go to the older lease."""


def oldest_first(candidate: Candidate, step: int) -> float:
    """`window` and `fifo`: as they were leased."""
    return candidate.position


def freshest_first(candidate: Candidate, step: int) -> float:
    """The groups of the newest policy; older ones wait until the window holds nothing else."""
    return -candidate.oldest_version


def uniform(candidate: Candidate, step: int) -> float:
    """Each candidate with equal probability, without replacement."""
    digest = hashlib.blake2b(f"{step}/{candidate.position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def highest_priority(candidate: Candidate, step: int) -> float:
    """The groups with the largest advantages."""
    return -candidate.priority


SAMPLERS: dict[Order, Sampler] = {
    "window": oldest_first,
    "fifo": oldest_first,
    "freshest": freshest_first,
    "uniform": uniform,
    "priority": highest_priority,
}
