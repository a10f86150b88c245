"""Where the journal keeps the bytes of groups: append-only files of fixed size beside the SQLite database.

Used by `journal.py` alone. Token arrays go here, not into SQLite, because a group of 256 KB costs 0.03 ms of CPU to
write over a file that is already there and 0.5 ms to insert as a blob, which SQLite checksums and writes twice. A
segment whose groups are no longer wanted is written over. What is here without a row in the database does not exist.

A write survives the death of the process as soon as it returns (it is in the kernel's page cache). It is not forced to
the disk: a power failure may leave a segment damaged, and then restoring says so with a ValueError.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.replay import wire
from asyncrl.replay.messages import Place

SEGMENT_BYTES = 64 << 20
_LENGTHS = struct.Struct(f"<{wire.FRAMES_PER_GROUP}Q")


class Segments:
    """Appends groups and reads them back."""

    def __init__(self, folder: Path, used: set[int]) -> None:
        """`used`: segments that the database refers to; all others there are free."""
        self._folder, self._used = folder, used
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = {int(p.stem) for p in folder.glob("*.bin")}
        self._free = sorted(found - used)
        self._next = max(found, default=-1) + 1
        self._current, self._fd, self._offset = -1, -1, SEGMENT_BYTES

    def append(self, frames: Sequence[wire.Frame]) -> Place:
        """Write one group. Raises OSError when the disk is full."""
        lengths = [memoryview(f).nbytes for f in frames]
        total = _LENGTHS.size + sum(lengths)
        if self._offset + total > SEGMENT_BYTES or self._fd < 0:
            self._open_next()
        place = Place(self._current, self._offset, total)
        write_all(self._fd, [_LENGTHS.pack(*lengths), *frames], self._offset, total)
        self._offset += total
        return place

    def hold(self, sizes: Iterable[int]) -> bool:
        """Whether groups of so many bytes find room in files that are there already."""
        room = SEGMENT_BYTES - self._offset if self._fd >= 0 else 0
        return bool(self._free) or sum(_LENGTHS.size + size for size in sizes) <= room

    def read(self, place: Place) -> list[bytes]:
        """The frames of one group. Raises ValueError when they are not there in full."""
        with open(self._path(place.segment), "rb") as file:
            data = memoryview(os.pread(file.fileno(), place.length, place.offset))
        lengths = _LENGTHS.unpack_from(data) if len(data) >= _LENGTHS.size else (0,)
        if len(data) != place.length or _LENGTHS.size + sum(lengths) != place.length:
            raise ValueError(f"segment {place.segment} is damaged at {place.offset}")
        frames, start = [], _LENGTHS.size
        for length in lengths:
            frames.append(bytes(data[start : start + length]))
            start += length
        return frames

    def keep(self, used: set[int]) -> None:
        """Only these segments, and the one that is being written, are still wanted: the others are written over."""
        self._free = sorted({*self._free, *(self._used - used - {self._current})})
        self._used = used | ({self._current} if self._current >= 0 else set())

    def trim(self, spare: int) -> None:
        """Delete free segments but for `spare` of them."""
        for segment in self._free[spare:]:
            self._path(segment).unlink(missing_ok=True)
        del self._free[spare:]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_next(self) -> None:
        self.close()
        if self._free:
            self._current = self._free.pop(0)
        else:
            self._current, self._next = self._next, self._next + 1
        self._fd = os.open(self._path(self._current), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._offset = 0
        self._used = self._used | {self._current}

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}.bin"


def write_all(fd: int, parts: Sequence[wire.Frame], offset: int, total: int) -> None:
    """Write `total` bytes at `offset`. Raises OSError when the disk is full."""
    written = os.pwritev(fd, parts, offset)
    if written < total:  # interrupted, or more than the kernel takes at once
        rest = memoryview(b"".join(bytes(p) for p in parts))[written:]
        while rest:
            written = os.pwrite(fd, rest, offset + total - len(rest))
            rest = rest[written:]
