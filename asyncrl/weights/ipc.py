"""A weight group within one host, in which receivers read buckets where the sender has them.

Stands for a torch process group in `wire.py` where two members of the group compute on one GPU: NCCL does not
connect a GPU with itself, and through host memory weights take a hundred times as long. Over a Unix socket the sender
says which bucket is complete and where it lies (CUDA IPC; on a CPU an anonymous file); the receiver maps that memory,
loads from it, and says when it is done, or why it cannot. Nothing here blocks once the group is built: whoever waits
asks again. What goes wrong, and a peer that is gone, is a WireBroken.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from asyncrl.weights.messages import JoinSpec
from asyncrl.weights.store import STORE_POLL_S, WireBroken

_KEY = "lender"
"""Where the store keeps the name of the sender's socket, while it is open."""
_CANNOT = "cannot"
"""Where a receiver says why it cannot come to it."""
_UNAVAILABLE = "the sender's memory cannot be read here: "
_DEVICE = 6
"""Position of the device in what `reduce_tensor` returns; what precedes it is known here."""
_NUMBER_BYTES = 8
"""Of a receiver's word that it is done with a bucket; any other length is the reason why it cannot read one."""


class _Lent(msgspec.Struct, array_like=True):
    """One bucket is complete: bytes `start` to `end` of a buffer."""

    number: int
    buffer: int
    start: int
    end: int
    in_file: bool
    """Whether the buffer lies in host memory: then its file comes along, for whoever has not mapped it already."""
    handle: tuple[Any, ...] | None
    """Of a buffer on a GPU; None when this receiver has mapped it already."""
    nbytes: int
    """Of the whole buffer."""


class Lender:
    """The sender's end: rank 0 of the group."""

    def __init__(self, readers: list[socket.socket], device: torch.device) -> None:
        self._readers, self._device = readers, device
        self._returned = [0] * len(readers)
        self._number = 0
        self._buffers: dict[int, torch.UntypedStorage] = {}

    def broadcast(self, buffers: list[Tensor], _: object = None) -> Lending:
        """Lend what the current stream has put into one buffer, made by `shareable`, to every receiver."""
        _synchronize(self._device)
        self._number += 1
        try:
            lent, files = self._place(buffers[0])
        except (RuntimeError, OSError) as error:
            raise WireBroken(f"{_UNAVAILABLE}{_first_line(error)}") from error
        try:
            for reader in self._readers:
                socket.send_fds(reader, [msgspec.msgpack.encode(lent)], files)
        except OSError as error:
            raise WireBroken(f"a receiver has left: {error}") from error
        finally:
            _close(files)
        return Lending(self, self._number)

    def is_back(self, number: int) -> bool:
        """Whether every receiver is done with bucket `number`. Hears all: one may have left while another reads."""
        for i, reader in enumerate(self._readers):
            while self._returned[i] < number:
                said, _ = _next(reader, f"receiver {i + 1}")
                if said is None:
                    break
                if len(said) != _NUMBER_BYTES:
                    raise WireBroken(said.decode(errors="replace"))
                self._returned[i] = int.from_bytes(said, "little")
        return min(self._returned) >= number

    def hang_up(self) -> None:
        """Let the others know at once."""
        for reader in self._readers:
            _hang_up(reader)

    def let_go(self) -> None:
        """Free what is held."""
        self._buffers.clear()

    def _place(self, bucket: Tensor) -> tuple[_Lent, list[int]]:
        """Where the bucket lies, and the file to send along."""
        storage, start = bucket.untyped_storage(), int(bucket.storage_offset())
        known = list(self._buffers)
        lent = _Lent(self._number, len(known), start, start + bucket.numel(), storage.device.type == "cpu", None,
                     storage.nbytes())  # fmt: skip
        if storage.data_ptr() in self._buffers:
            lent.buffer = known.index(storage.data_ptr())
            return lent, []
        self._buffers[storage.data_ptr()] = storage
        if lent.in_file:
            return lent, [os.open(str(storage.filename), os.O_RDONLY)]
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        lent.handle = tuple(reduce_tensor(whole)[1][_DEVICE:])
        return lent, []


class Lending:
    def __init__(self, lender: Lender, number: int) -> None:
        self._lender, self._number = lender, number

    def is_completed(self) -> bool:
        return self._lender.is_back(self._number)

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Borrower:
    """A receiver's end. It has one bucket at a time, and gives it back when it asks for the next."""

    def __init__(self, lender: socket.socket, device: torch.device) -> None:
        self._lender, self._device = lender, device
        self._asked = self._come = self._returned = 0
        self._buffers: dict[int, Tensor] = {}
        self._buckets: dict[int, Tensor] = {}

    def broadcast(self, _buffers: list[Tensor], _: object = None) -> Borrowing:
        """Ask for the next bucket; what it would be copied into is not looked at."""
        self._asked += 1
        return Borrowing(self, self._asked)

    def has_come(self, number: int) -> bool:
        """Whether bucket `number` is there; those before it are given back."""
        self.give_back(number - 1)
        while self._come < number:
            said, files = _next(self._lender, "the sender")
            if said is None:
                return False
            lent = msgspec.msgpack.decode(said, type=_Lent)
            try:
                self._buckets[lent.number] = self._mapped(lent, files)[lent.start : lent.end]
            finally:
                _close(files)
            self._come = lent.number
        return True

    def bucket(self, number: int) -> Tensor:
        """What has come as bucket `number`, uint8, in the sender's memory."""
        return self._buckets[number]

    def give_back(self, number: int | None = None) -> None:
        """Up to bucket `number` (all that have come), once the current stream is done with what was queued on them."""
        number = self._come if number is None else number
        if number <= self._returned:
            return
        _synchronize(self._device)
        for taken in range(self._returned + 1, number + 1):
            self._buckets.pop(taken, None)
        self._returned = number
        try:
            self._lender.send(number.to_bytes(_NUMBER_BYTES, "little"))
        except OSError as error:
            raise WireBroken(f"the sender has left: {error}") from error

    def hang_up(self) -> None:
        """Let the sender know at once."""
        _hang_up(self._lender)

    def let_go(self) -> None:
        """Unmap the sender's memory, once nothing reads it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._buckets.clear()
        self._buffers.clear()

    def _mapped(self, lent: _Lent, files: list[int]) -> Tensor:
        if lent.buffer not in self._buffers:
            try:
                self._buffers[lent.buffer] = _map(lent, files, self._device)
            except (RuntimeError, ValueError) as error:
                raise self._cannot(_first_line(error)) from error
        return self._buffers[lent.buffer]

    def _cannot(self, what: str) -> WireBroken:
        """The sender is told why: of an engine's ranks this one's reason may be heard by nobody else."""
        reason = f"{_UNAVAILABLE}{what}"
        try:
            self._lender.send(reason.encode())
        except OSError as error:  # and has taken its memory along
            return WireBroken(f"the sender has left: {error}")
        return WireBroken(reason)


class Borrowing:
    def __init__(self, borrower: Borrower, number: int) -> None:
        self._borrower, self._number = borrower, number

    def is_completed(self) -> bool:
        return self._borrower.has_come(self._number)

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def bucket(self) -> Tensor:
        return self._borrower.bucket(self._number)


def shareable(nbytes: int, device: torch.device) -> Tensor:
    """Zeros that a Lender can lend: uint8, on that GPU, or in a file without a name.

    Raises WireBroken (`is_unavailable`) where this system has no such files."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # what former receivers have let go of
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    try:
        file = os.memfd_create("asyncrl-weights")
    except (AttributeError, OSError) as error:
        raise WireBroken(f"{_UNAVAILABLE}no file in memory: {error}") from error
    try:
        os.ftruncate(file, nbytes)
        buffer = _open(f"/proc/{os.getpid()}/fd/{file}", nbytes, to_write=True)
    except (RuntimeError, OSError) as error:
        os.close(file)
        raise WireBroken(f"{_UNAVAILABLE}{_first_line(error)}") from error
    weakref.finalize(buffer.untyped_storage(), os.close, file)
    return buffer


def lend(store: dist.Store, spec: JoinSpec, device: torch.device) -> Lender:
    """Build the group as rank 0: wait until every other rank has come to a socket of this host.

    Raises WireBroken, within spec.timeout_s (`is_unavailable`: a rank cannot come).
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"asyncrl-weights-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")  # no file: nothing to leave behind
            listener.listen(spec.world_size)
            listener.setblocking(False)
            store.set(_KEY, name)
            try:
                readers = _admit(listener, store, spec)
            finally:
                store.set(_KEY, "")  # first: who comes too late shall not take this for another host
    except OSError as error:
        raise WireBroken(f"receivers did not come to the sender's socket: {error}") from error
    return Lender([readers[rank] for rank in sorted(readers)], device)


def _admit(listener: socket.socket, store: dist.Store, spec: JoinSpec) -> dict[int, socket.socket]:
    """Every other rank, by its number. Whoever comes and says nothing keeps nobody waiting."""
    readers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + spec.timeout_s
    with selectors.DefaultSelector() as door:
        door.register(listener, selectors.EVENT_READ)
        while missing := set(range(1, spec.world_size)) - set(readers):
            if time.monotonic() > deadline:
                raise WireBroken(f"ranks {sorted(missing)} did not come to the sender's socket in {spec.timeout_s:g} s")
            if store.check([_CANNOT]):
                raise WireBroken(store.get(_CANNOT).decode())
            for key, _ in door.select(STORE_POLL_S):
                if key.fileobj is listener:
                    caller = listener.accept()[0]
                    caller.setblocking(False)
                    if _is_ours(caller):
                        door.register(caller, selectors.EVENT_READ, caller)
                    continue
                door.unregister(key.data)
                if (rank := _said(key.data)) in range(1, spec.world_size):
                    readers[rank] = key.data
    return readers


def borrow(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device) -> Borrower:
    """Build the group as another rank. Raises WireBroken (`is_unavailable`: the sender is on another host)."""
    name = _await_key(store, spec.timeout_s)
    lender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        lender.connect(f"\0{name}")
        if not _is_ours(lender):
            raise PermissionError("its socket is another user's")
        lender.send(rank.to_bytes(_NUMBER_BYTES, "little"))
    except OSError as error:
        lender.close()
        if store.get(_KEY).decode() != name:
            raise WireBroken("the sender waits for nobody any more") from error
        reason = f"{_UNAVAILABLE}the sender is not on this host ({error})"
        store.set(_CANNOT, reason)
        raise WireBroken(reason) from error
    lender.setblocking(False)
    return Borrower(lender, device)


def _await_key(store: dist.Store, timeout_s: float) -> str:
    """The name of the sender's socket. Asks again and again: a wait would hold the connection, and nobody else could
    ask whether all is over."""
    deadline = time.monotonic() + timeout_s
    while not store.check([_KEY]):
        if time.monotonic() > deadline:
            raise WireBroken(f"the sender opened no socket within {timeout_s:g} s")
        time.sleep(0.002)
    if not (name := store.get(_KEY).decode()):
        raise WireBroken("the sender waits for nobody any more")
    return name


def is_unavailable(reason: str) -> bool:
    """Whether a wire broke because processes cannot share memory, so that it would break again."""
    return _UNAVAILABLE in reason


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.geteuid()


def _said(caller: socket.socket) -> int:
    """The rank that a caller claims; 0 for none."""
    try:
        return int.from_bytes(caller.recv(_NUMBER_BYTES), "little")
    except OSError:
        return 0


def _map(lent: _Lent, files: list[int], device: torch.device) -> Tensor:
    if lent.in_file:
        if not files:
            raise ValueError("its file did not come along: too many open files?")
        return _open(f"/proc/self/fd/{files[0]}", lent.nbytes, to_write=False)
    if device.type != "cuda" or lent.handle is None:
        raise ValueError(f"it is on a GPU, and this receiver on {device}")
    known = (Tensor, (lent.nbytes,), (1,), 0, torch.UntypedStorage, torch.uint8)
    return rebuild_cuda_tensor(*known, device.index, *lent.handle[1:])


def _open(path: str, nbytes: int, *, to_write: bool) -> Tensor:
    """What else this process writes there stays its own."""
    return torch.from_file(path, shared=to_write, size=nbytes, dtype=torch.uint8)


def _next(peer: socket.socket, who: str) -> tuple[bytes | None, list[int]]:
    """The next message, None when there is none yet, and the open files that came with it."""
    try:
        said, files, _, _ = socket.recv_fds(peer, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None, []
    except OSError as error:
        raise WireBroken(f"{who} cannot be heard any more: {error}") from error
    if not said:
        raise WireBroken(f"{who} has left")
    return said, files


def _hang_up(peer: socket.socket) -> None:
    """Heard at once, also where a forked child still has the socket."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
