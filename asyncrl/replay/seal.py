"""A checksum over a whole message, so that what was damaged on the way is never acted on.

Used by `wire.pack_message` and by whoever receives messages. A damaged message is ignored and its sender asks again;
without the seal a flipped bit in a header could end somebody else's lease, and one in a body would be trained on. It
guards against faults, not against an adversary: that is what CURVE keys are for. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

Frame = bytes | bytearray | memoryview
SEAL_BYTES = 8
_SHORT = 4096
"""Up to here CRC-32 is quicker; beyond, the sum of 64-bit words (20 GB/s against 1 GB/s)."""


class Damaged(ValueError):
    """The message is not the one that was sent."""


def seal(frames: Sequence[Frame]) -> bytes:
    """8 bytes that follow from every byte of the frames, their lengths and their order."""
    value = 0
    for frame in frames:
        view = memoryview(frame).cast("B")
        value = zlib.crc32(_digest(view) + len(view).to_bytes(8, "little"), value)
    return value.to_bytes(SEAL_BYTES, "little")


def unseal(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of a message, whose first ends with the seal, without it. Raises Damaged when it does not fit."""
    first = memoryview(frames[0] if frames else b"")
    plain = [first[: max(0, first.nbytes - SEAL_BYTES)], *frames[1:]]
    if first[-SEAL_BYTES:] != seal(plain):
        raise Damaged(f"a message of {len(frames)} frames was damaged on the way, or is of another asyncrl")
    return plain


def _digest(view: memoryview) -> bytes:
    if len(view) <= _SHORT:
        return zlib.crc32(view).to_bytes(8, "little")
    words = len(view) // 8
    total = int(np.frombuffer(view, np.uint64, words).sum()) + zlib.crc32(view[8 * words :])
    return (total % (1 << 64)).to_bytes(8, "little")
