"""A group as the replay server holds it: its frames, untouched, and the few numbers that decisions need.

Made by the service when an insert arrives and by the journal when it restores one. The arrays are never unpacked here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.replay import wire
from asyncrl.replay.messages import Place
from asyncrl.replay.seal import digest_of


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """One packed group."""

    frames: Sequence[wire.Frame]
    """Header and body, as `wire.pack_group` makes them; none when the group lies in a file."""
    lease_id: int
    num_tokens: int
    nbytes: int
    oldest_version: int
    """Smallest version among the trained tokens; -1 when there is none."""
    newest_version: int
    priority: float
    """Mean |reward - mean reward| of the siblings."""
    reward: float
    """Mean over the siblings."""
    length: float
    """Mean number of tokens per sibling."""
    digests: Sequence[bytes]
    """Of the frames, for the seal of the message that carries them on."""
    place: Place | None = None
    """In a generator's file."""


def parcel_of(
    frames: Sequence[wire.Frame], digests: Sequence[bytes] | None = None, place: Place | None = None
) -> Parcel:
    """Check the frames of a group and measure it; their digests may be known. Frames that were read at a `place` are
    not kept. Raises ValueError."""
    header = wire.check_group(frames)
    oldest, newest = wire.version_range(header, frames[1])
    G, num_tokens = len(header.lengths), sum(header.lengths)
    reward = sum(header.rewards) / G
    return Parcel(
        frames=frames if place is None else (),
        lease_id=header.lease_id,
        num_tokens=num_tokens,
        nbytes=sum(memoryview(f).nbytes for f in frames),
        oldest_version=oldest,
        newest_version=newest,
        priority=sum(abs(r - reward) for r in header.rewards) / G,
        reward=reward,
        length=num_tokens / G,
        digests=[digest_of(f) for f in frames] if digests is None else digests,
        place=place,
    )
