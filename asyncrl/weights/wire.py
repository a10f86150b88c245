"""The weight group: a process group of its own, built on a TCPStore, through which buckets are broadcast.

Used by the sender (rank 0) and by receivers. It is independent of the default process group, so a trainer under NCCL
and a generator with its own distributed set-up can both hold one. Over NCCL, gloo, or one host's memory (`ipc.py`).
Every wait polls, calls `watch` between polls and has a bound; whatever goes wrong is a WireBroken, after which the
group is closed and never used again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.shared_gpu import with_generator
from asyncrl.weights import ipc
from asyncrl.weights.messages import JoinSpec
from asyncrl.weights.store import Watch, WireBroken, bounded, local_address, meet, prefixed

log = logging.getLogger(__name__)

RUN_AHEAD = 8
"""Buckets that may be queued on a GPU beyond the last one known to have arrived."""
POLL_S = {"nccl": 5e-5, "ipc": 5e-5, "gloo": 5e-4}
ABORT_S = 10.0

NO_TEAR_DOWN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Read by torch while a group is built. Left alone, NCCL's watchdog ends the whole process when a peer dies; a dead
generator must not take the trainer along, so we poll, bound and abort ourselves."""


def exact(device: torch.device | str) -> torch.device:
    """The device with its index: `cuda` is the current one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the calling thread's current one (threads start with GPU 0); nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def resolve_backend(choice: str, device: torch.device) -> str:
    """`auto` -> nccl for a GPU, ipc for one that a generator shares, gloo for a CPU."""
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return "gloo"
    return "ipc" if with_generator() else "nccl"


class Wire:
    """One group, open. Broadcasts are started in order, and made use of in order.

    With nccl the processor runs ahead of the GPU: `order` only makes the current stream wait. It runs RUN_AHEAD buckets
    ahead at most, so that a member that died is noticed before this process waits for the GPU somewhere unwatched.
    """

    def __init__(self, group: Any, spec: JoinSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._group = group
        self._started, self._ordered = deque[tuple[Any, Tensor]](), deque[Any]()
        self._on_gpu, self._shared = spec.backend == "nccl", spec.backend == "ipc"

    @property
    def in_flight(self) -> int:
        """Broadcasts started whose buffers are not yet ours again."""
        return len(self._started)

    def start(self, buffer: Tensor) -> None:
        """Begin to broadcast `buffer` (of `make_buffer`) from rank 0, after what the current stream has queued. Raises
        WireBroken."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        try:
            self._started.append((self._group.broadcast([buffer], options), buffer))
        except WireBroken:
            raise
        except RuntimeError as error:
            raise WireBroken(f"broadcast did not start: {error}") from error

    def order(self, watch: Watch) -> Tensor:
        """What is queued (gloo, ipc: done) from here on comes after the oldest broadcast in flight.

        Returns the buffer it filled; with ipc the sender's, and the one before it is the sender's again. Raises
        WireBroken."""
        work, buffer = self._started.popleft()
        if not self._on_gpu:
            self._finish(work, watch)
        try:
            work.wait()
        except RuntimeError as error:
            raise WireBroken(f"broadcast failed: {error}") from error
        if self._on_gpu:
            self._ordered.append(work)
        while len(self._ordered) > RUN_AHEAD:
            self._finish(self._ordered.popleft(), watch)
        return work.bucket() if isinstance(work, ipc.Borrowing) else buffer

    def drain(self, watch: Watch) -> None:
        """Wait until every broadcast has left or arrived. Raises WireBroken."""
        while self._started:
            self.order(watch)
        while self._ordered:
            self._finish(self._ordered.popleft(), watch)
        if isinstance(self._group, ipc.Borrower):
            self._group.give_back()

    def close(self) -> None:
        """Leave the group, abandoning what is in flight. Hardly blocks: a stuck gloo operation ends by its timeout."""
        if self._group is None:
            return
        held = [self._group, *self._started, *self._ordered]
        if self._on_gpu:
            _abort(self._group)
        if self._shared:
            self._group.hang_up()
        self._group = None
        self._started.clear()
        self._ordered.clear()
        _let_go(held)

    def _finish(self, work: Any, watch: Watch) -> None:
        deadline = time.monotonic() + self.spec.timeout_s
        while not work.is_completed():
            watch()
            if time.monotonic() > deadline:
                raise WireBroken(f"a bucket took longer than {self.spec.timeout_s:g} s")
            time.sleep(POLL_S[self.spec.backend])


def open_wire(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device, watch: Watch) -> Wire:
    """Build the group with all its members and send one small broadcast through it, so that its first use is cheap.

    Members first meet in the store, where waiting can be called off, and only then enter the backend's own set-up.
    Raises WireBroken, within spec.timeout_s.
    """
    deadline = time.monotonic() + spec.timeout_s
    scoped = prefixed(store, spec.generation)
    bounded(lambda: meet(scoped, spec, rank, watch, deadline), "the meeting of the group", watch, deadline)
    group = bounded(lambda: _build(scoped, spec, rank, device), "group set-up", watch, deadline)
    wire = Wire(group, spec, device)
    try:
        wire.start(make_buffer(spec, 16, device, sends=rank == 0))
        wire.drain(watch)
    except WireBroken:
        wire.close()
        raise
    return wire


def make_buffer(spec: JoinSpec, nbytes: int, device: torch.device, *, sends: bool) -> Tensor:
    """Room for a bucket, uint8: on the GPU for nccl; in host memory for gloo, whatever the model's device; for ipc
    where receivers can map it, and nowhere on these."""
    if spec.backend == "ipc" and sends:
        return ipc.shareable(nbytes, device)
    place = {"nccl": device, "gloo": torch.device("cpu"), "ipc": torch.device("meta")}[spec.backend]
    return torch.zeros(nbytes, dtype=torch.uint8, device=place)


def _build(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device) -> Any:
    if spec.backend == "nccl":
        return _build_nccl(store, spec, rank, device)
    if spec.backend == "ipc":
        return ipc.borrow(store, spec, rank, device) if rank else ipc.lend(store, spec, device)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(spec.host, spec.port))]
    options._timeout = timedelta(seconds=spec.timeout_s)
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, spec.world_size, options)


def _build_nccl(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device) -> Any:
    """The communicator itself is made by the first collective, so there is one here, where set-up may be abandoned."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True  # copies and checksums run beside it, and would keep its kernels waiting
    options._timeout = timedelta(days=1)  # torch's watchdog reacts to its own bound by ending the process; ours is kept
    with _environment(NO_TEAR_DOWN), current(device):
        group = dist.ProcessGroupNCCL(store, rank, spec.world_size, options)
        Wire(group, spec, device).start(torch.zeros(16, dtype=torch.uint8, device=device))
    return group


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _abort(group: Any) -> None:
    """End NCCL's kernels, also those that wait for a dead peer; not trusted to return."""
    thread = threading.Thread(target=group.abort, daemon=True, name="weight-group-abort")
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        log.warning("NCCL did not abort a weight group within %g s", ABORT_S)


def _let_go(held: list[Any]) -> None:
    """Drop the last references in a thread: gloo's destructor waits for operations that are stuck."""

    def drop() -> None:
        if isinstance(held[0], ipc.Lender | ipc.Borrower):
            held[0].let_go()
        held.clear()

    thread = threading.Thread(target=drop, daemon=True, name="weight-group-end")
    thread.start()
    _ending[:] = [t for t in _ending if t.is_alive()] + [thread]


_ending: list[threading.Thread] = []


@atexit.register
def _settle() -> None:
    """Let groups that are ending end before the interpreter does: a destructor that returns into a finalised one aborts
    the process. One that is stuck does not return, and is not waited for."""
    deadline = time.monotonic() + 1.0
    for thread in _ending:
        thread.join(max(deadline - time.monotonic(), 0.0))
