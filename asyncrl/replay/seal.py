"""A checksum over a whole message, so that what was damaged on the way is never acted on.

Used by `wire.pack_message` and by whoever receives messages. A damaged message is ignored and its sender asks again;
the digests of a group stay with it on the server, so that the trainer checks what the generator summed;
without the seal a flipped bit in a header could end somebody else's lease, and one in a body would be trained on. It
guards against faults, not against an adversary: that is what CURVE keys are for. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

Frame = bytes | bytearray | memoryview
SEAL_BYTES = 8


class Damaged(ValueError):
    """The message is not the one that was sent."""


class Payload(NamedTuple):
    """What follows the header of a message that was found intact."""

    frames: Sequence[Frame]
    digests: Sequence[bytes]


def seal(header: Frame, digests: Sequence[bytes] = ()) -> bytes:
    """8 bytes that follow from every byte of a message, the lengths of its frames and their order.

    `digests` are those of the frames after the header.
    """
    return xxhash.xxh3_64_digest(b"".join((digest_of(header), *digests)))


def unseal(frames: Sequence[Frame]) -> tuple[memoryview, Payload]:
    """The header of a message, without the seal at its end, and the rest. Raises Damaged when the seal does not fit."""
    first, rest = memoryview(frames[0] if frames else b""), frames[1:]
    header, digests = first[: max(0, first.nbytes - SEAL_BYTES)], [digest_of(f) for f in rest]
    if first[-SEAL_BYTES:] != seal(header, digests):
        raise Damaged(f"a message of {len(frames)} frames was damaged on the way, or is of another asyncrl")
    return header, Payload(rest, digests)


def digest_of(frame: Frame) -> bytes:
    """16 bytes that follow from the bytes of one frame, their order and their number: XXH3 (figures in bench.md)."""
    return xxhash.xxh3_128_digest(frame)
