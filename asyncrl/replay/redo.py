"""What was committed since the database saw it last: a file of records, each written with one call and checked with a
CRC when it is read.

Used by `journal.py` alone. A turn's changes are safe from the death of the process as soon as `append` returns; a
transaction of SQLite costs fifteen times as much, so many turns share one. Each transaction ends an epoch and empties
the file: records of another epoch than the one that follows the database's are in the database already.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.replay.segments import write_all

HELD_S = 5.0
"""A server that was killed may hold the file for a moment."""
_HEAD = struct.Struct("<QII")
"""Epoch, length and CRC-32 of the record."""


class Turn(msgspec.Struct, array_like=True, kw_only=True):
    """What one turn of the server changed: rows of the database's tables."""

    seats: list[tuple[Any, ...]]
    """The first column is the position."""
    prompts: list[tuple[int, bytes]]
    removed: list[int]
    """Positions."""
    used: list[tuple[int, int]]
    steps: list[tuple[int, int]]
    curriculum: list[tuple[str, int | None, int | None]]
    """Nothing beside the key: forgotten."""
    counters: bytes


def merge(turns: list[Turn]) -> Turn:
    """One turn that changes what all of them changed: of several changes of one row the last counts."""
    return Turn(
        seats=list({row[0]: row for turn in turns for row in turn.seats}.values()),
        prompts=[row for turn in turns for row in turn.prompts],
        removed=[position for turn in turns for position in turn.removed],
        used=[row for turn in turns for row in turn.used],
        steps=list({row[0]: row for turn in turns for row in turn.steps}.values()),
        curriculum=list({row[0]: row for turn in turns for row in turn.curriculum}.values()),
        counters=turns[-1].counters,
    )


class Redo:
    """Appends records and reads them back; one process at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when another process holds the file: two of them would write over each other's records."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = 0
        if not _lock(self._fd):
            os.close(self._fd)
            raise ValueError(
                f"another replay server uses {path.parent}: a run has one; end it first, or choose another --run-dir"
            )

    def is_empty(self) -> bool:
        return not os.fstat(self._fd).st_size

    def read(self, epoch: int) -> list[bytes]:
        """The records of one epoch, up to the first that is not whole: it was never acknowledged."""
        data, records, start = os.pread(self._fd, os.fstat(self._fd).st_size, 0), [], 0
        while start + _HEAD.size <= len(data):
            found, length, crc = _HEAD.unpack_from(data, start)
            record = data[start + _HEAD.size : start + _HEAD.size + length]
            if found != epoch or len(record) != length or zlib.crc32(record) != crc:
                break
            records.append(record)
            start += _HEAD.size + length
        return records

    def append(self, epoch: int, record: bytes) -> None:
        """Write one record. Raises OSError when the disk is full."""
        whole = _HEAD.pack(epoch, len(record), zlib.crc32(record)) + record
        write_all(self._fd, [whole], self.size, len(whole))
        self.size += len(whole)

    def empty(self) -> None:
        """The database has it all."""
        os.ftruncate(self._fd, 0)
        self.size = 0

    def close(self) -> None:
        os.close(self._fd)


def _lock(fd: int) -> bool:
    """Whether nobody else has the file, or the file system has no locks; waits HELD_S for a process that is ending."""
    deadline = time.monotonic() + HELD_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:
            return True
        else:
            return True
