"""Groups that do not go through sockets: on the host of the server, generators leave them in files and send the place.

`Files` is the server's end: a folder that it offers with its welcome. `Writer` is a generator's; trainers `gather`.
Groups below LEAST_BYTES, other hosts, and whoever does not see the folder use the socket. Nothing is mapped: a file
that was cut short is a ValueError, and what a process has read is its own.

A segment is written by its owner alone, one group behind the other. It is written over only after its owner has asked,
when all its groups had been answered for, and was told that nothing refers to it any more. What dead owners leave is
swept by the server: an owner holds a lock as long as it lives. As in `segments.py`, a write survives the death of the
process as soon as it returns, and is not forced to the disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import numpy as np

from asyncrl.replay.messages import Offer, Place
from asyncrl.replay.seal import Frame, digest_of
from asyncrl.replay.segments import write_all

SEGMENT_BYTES = 16 << 20
LEAST_BYTES = 64 << 10
"""Smaller groups go through the socket, and so do those that are longer than a segment."""
SPARE_SEGMENTS = 2
"""Free segments that a generator keeps to be written over; it deletes the others."""
MAX_ASKED = 256
"""Segments that a generator asks about at once."""
FILES_OPEN = 64
_PREFIX = "asyncrl-groups-"
_TOKEN, _LOCK = "token", "lock"
_OWNER = re.compile("[0-9a-f]{16}")
_NAME = re.compile(rf"({_OWNER.pattern})\.(?:{_LOCK}|([0-9]{{1,16}}))")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Key = tuple[str, int]
"""Owner and number of a segment."""


class Files:
    """The server's end: the folder, what is offered of it, and what is deleted there."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` outlives the server; None: one in the system's temporary folder, which does not. Raises OSError."""
        self._temporary = folder is None
        if folder is None:
            _clear_temporary()
            folder, self._claim = _make_temporary()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._reader, token = folder.absolute(), Reader(folder), token_hex(16)
        new = folder / f".{_TOKEN}.{os.getpid()}"
        self._token = _lock(new)
        os.write(self._token, token.encode())
        new.replace(folder / _TOKEN)
        self.offer = Offer(folder=str(self._folder), token=token, boot=_boot())

    def read(self, place: Place) -> list[Frame]:
        """Header and body of one group. Raises ValueError when they are not there as they were written."""
        return self._reader.read(place)

    def release(self, owner: str) -> None:
        """Files of the owner are going to be deleted: none stays open."""
        self._reader.forget(owner)

    def sweep(self, used: Set[Key], alive: Callable[[str], bool]) -> None:
        """Delete what owners that are dead have left and that is not `used`. Looks at the locks of those that are not
        known to be `alive`. Other files, and what cannot be looked at or deleted, stay."""
        found: dict[str, list[int]] = {}
        for name in filter(None, map(_NAME.fullmatch, _listed(self._folder))):
            numbers = found.setdefault(name[1], [])
            if name[2]:
                numbers.append(int(name[2]))
        for owner, numbers in found.items():
            if alive(owner) or not _is_free(_path(self._folder, owner, _LOCK)):
                continue
            gone = [n for n in numbers if (owner, n) not in used]
            self.release(owner)
            for number in gone:
                _delete(_path(self._folder, owner, number))
            if len(gone) == len(numbers):
                _delete(_path(self._folder, owner, _LOCK))

    def close(self) -> None:
        """Without a journal nothing of it is wanted any more."""
        self._reader.close()
        os.close(self._token)
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._claim)


class Reader:
    """Reads groups, and keeps open the file that it read last of each owner: a name is never used twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[int, int]] = {}
        """Segment and descriptor by owner."""

    def read(self, place: Place) -> list[Frame]:
        """Header and body of one group, in memory that may be written to. Raises ValueError when they are not there as
        they were written."""
        if not 0 <= place.header <= place.length <= SEGMENT_BYTES:
            raise ValueError(f"a group in a file may have {SEGMENT_BYTES} bytes, got {place.header} of {place.length}")
        frames: list[Frame] = [np.empty(n, np.uint8).data for n in (place.header, place.length - place.header)]
        try:
            segment, fd = self._open.get(place.owner, (-1, -1))
            if segment != place.segment:
                fd = self._open_next(place.owner, place.segment)
            whole = os.preadv(fd, frames, place.offset) == place.length
        except OSError as error:
            raise ValueError(f"segment {place.segment} of {place.owner} cannot be read: {error}") from error
        if not whole or [digest_of(f) for f in frames] != place.digests:
            raise ValueError(f"segment {place.segment} of {place.owner} does not hold the group at {place.offset}")
        return frames

    def forget(self, owner: str) -> None:
        if owner in self._open:
            os.close(self._open.pop(owner)[1])

    def close(self) -> None:
        for owner in list(self._open):
            self.forget(owner)

    def _open_next(self, owner: str, segment: int) -> int:
        """The name is made of a checked owner and a number: no path that was received is opened."""
        if not _OWNER.fullmatch(owner):
            raise ValueError(f"a group's file must belong to an incarnation, got {owner!r}")
        fd = os.open(_path(self._folder, owner, segment), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or os.geteuid() not in (found.st_uid, 0):  # root resumes a copied run
            os.close(fd)
            raise ValueError(f"segment {segment} of {owner} must be a regular file of this user")
        self.forget(owner)
        if len(self._open) >= FILES_OPEN:
            self.forget(next(iter(self._open)))
        self._open[owner] = segment, fd
        return fd


class Writer:
    """A generator's end. One thread."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Raises OSError when nothing can be written there."""
        self._folder, self._owner = folder, owner
        self._lock = _lock(_path(folder, owner, _LOCK))
        self._fd, self._current, self._offset, self._next = -1, -1, SEGMENT_BYTES, 0
        self._unanswered = Counter[int]()
        """Groups by segment."""
        self._full: list[int] = []
        self._spare: list[int] = []
        self._ask = False

    def append(self, frames: Sequence[Frame]) -> Place | None:
        """Write one group; None when it has to go through the socket. Raises OSError when the disk is full."""
        header, body = (memoryview(f).nbytes for f in frames)
        if not LEAST_BYTES <= header + body <= SEGMENT_BYTES:
            return None
        try:
            if self._offset + header + body > SEGMENT_BYTES:
                self._open_next()
            write_all(self._fd, frames, self._offset, header + body)
        except OSError:
            self._make_do()
            raise
        digests = [digest_of(f) for f in frames]
        place = Place(self._current, self._offset, header + body, self._owner, header, digests)
        self._offset += header + body
        self._unanswered[place.segment] += 1
        return place

    def answered(self, place: Place) -> None:
        """The group is the server's, or nobody's. Not for a request that was given up: it may still be on its way."""
        self._unanswered[place.segment] -= 1

    def ask(self) -> list[int]:
        """Segments that the server should be asked about, whenever one more is full. `told` has to follow: of two
        answers about one segment the second could be older than what was written between them."""
        if not self._ask:
            return []
        self._ask = False
        asked = [s for s in self._full if not self._unanswered[s]][:MAX_ASKED]
        self._full = [s for s in self._full if s not in asked]
        return asked

    def told(self, asked: Sequence[int], unused: Sequence[int]) -> None:
        """The answer: to these nothing refers."""
        for segment in asked:
            if segment not in unused:
                self._full.append(segment)
            elif len(self._spare) < SPARE_SEGMENTS:
                self._spare.append(segment)
            else:
                _delete(_path(self._folder, self._owner, segment))

    def close(self) -> None:
        """What was written stays; with the lock goes the claim to the rest."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _make_do(self) -> None:
        """The disk takes no more: go on in files that have their place there already, and ask for some."""
        self._ask = True
        if self._spare:
            self._offset = SEGMENT_BYTES

    def _open_next(self) -> None:
        number = self._spare[0] if self._spare else self._next
        # A new one is never somebody else's that is there already, nor this owner's from before.
        fd = _create(_path(self._folder, self._owner, number), 0 if self._spare else os.O_EXCL)
        if self._fd >= 0:
            os.close(self._fd)
            self._full.append(self._current)
            self._ask = True
        if self._spare:
            del self._spare[0]
        else:
            self._next += 1
        self._fd, self._current, self._offset = fd, number, 0


def accept(offer: Offer | None) -> Path | None:
    """The folder that is offered, if this process sees the same one, on the same machine, and it is private."""
    if offer is None or not offer.boot or offer.boot != _boot():
        return None
    with suppress(OSError, ValueError):
        folder = Path(offer.folder)
        found = os.lstat(folder)
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if private and (folder / _TOKEN).read_text() == offer.token:
            return folder
    return None


def gather(folder: Path, places: Sequence[Place | None], frames: Sequence[Frame]) -> list[Frame]:
    """The frames of a whole batch, some of which have come while others lie in files. Raises ValueError."""
    whole, came, reader = list[Frame](), iter(frames), Reader(folder)
    try:
        for place in places:
            whole += [next(came), next(came)] if place is None else reader.read(place)
    finally:
        reader.close()
    return whole


def _make_temporary() -> tuple[Path, int]:
    """A new folder, and the lock that says that its server lives. Another one that starts may clear it away before it
    is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):
            claim = _open_folder(folder)
            fcntl.flock(claim, fcntl.LOCK_SH)
            if folder.exists():
                return folder, claim
            os.close(claim)


def _clear_temporary() -> None:
    """Delete folders of servers that were killed: nobody holds the lock on them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            claim = _open_folder(folder)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(claim).st_uid == os.geteuid() and _is_free(folder / _TOKEN):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(claim)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _path(folder: Path, owner: str, name: int | str) -> str:
    return f"{folder}/{owner}.{name}"


def _boot() -> str:
    """Which boot of which machine this is; "" where the kernel does not say."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def _create(path: str | Path, flags: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _delete(path: str) -> None:
    """What cannot be deleted stays."""
    with suppress(OSError):
        os.unlink(path)


def _listed(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _lock(path: str | Path) -> int:
    """Held until the process ends or closes what is returned."""
    fd = _create(path)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _is_free(path: str | Path) -> bool:
    """Whether nobody holds the lock. No, where that cannot be seen."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
