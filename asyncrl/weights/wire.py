"""The weight group: a process group of its own, built on a TCPStore, through which buckets are broadcast.

Used by the sender (rank 0) and by receivers. It is independent of the default process group, so a trainer under NCCL
and a generator with its own distributed set-up can both hold one. Every wait polls, calls `watch` between polls and has
a bound; whatever goes wrong is a WireBroken, after which the group is closed and never used again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.weights.messages import JoinSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
Watch = Callable[[], None]
"""Called between polls; raises WireBroken when there is a reason to stop waiting."""

STORE_POLL_S = 0.05
"""How often a waiting receiver asks whether the sender gave up on the group."""

LISTEN_S = 3600.0
"""How long one wait for an announcement lasts; torch logs each that ends without one."""

RUN_AHEAD = 8
"""Buckets that may be queued on a GPU beyond the last one known to have arrived."""
ABORT_S = 10.0
GRACE_S = 0.5
"""For a step that keeps the bound itself, and can say who was missing."""

NO_TEAR_DOWN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Read by torch while a group is built. Left alone, NCCL's watchdog ends the whole process when a peer dies; a dead
generator must not take the trainer along, so we poll, bound and abort ourselves."""

_MARK = "weight wire broken: "


class WireBroken(RuntimeError):
    """The group can carry nothing more: a member died, stalled or was given up; perhaps not this process's fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if reason.startswith(_MARK) else _MARK + reason)


def is_wire_failure(error: BaseException) -> bool:
    """Whether an error is a WireBroken, also after an RPC that kept only its text."""
    return isinstance(error, WireBroken) or _MARK in str(error)


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
    """`auto` -> nccl for a GPU, gloo for a CPU."""
    return choice if choice != "auto" else ("nccl" if device.type == "cuda" else "gloo")


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """A TCPStore server that listens on `host` alone, on a free port; it lives as long as the object."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(spec: JoinSpec) -> dist.TCPStore:
    """A client of the sender's store. Raises WireBroken when it cannot be reached within spec.timeout_s."""

    def connect() -> dist.TCPStore:
        return dist.TCPStore(spec.host, spec.port, is_master=False, timeout=timedelta(seconds=spec.timeout_s))

    what = f"the connection to the store at {spec.host}:{spec.port}"
    return _bounded(connect, what, lambda: None, time.monotonic() + spec.timeout_s)


def give_up(store: dist.Store, generation: int, reason: str) -> None:
    """Tell every member of a group to stop waiting for it (their `watch_store` raises)."""
    _prefixed(store, generation).set("given_up", reason)


def announce(store: dist.Store, spec: JoinSpec, number: int, digest: str) -> None:
    """Tell each member of a group that its broadcast `number` (from 0), of the plan with this digest, begins now. One
    key per member, written over: those who do not listen pile up nothing."""
    keys = [_began(rank) for rank in range(1, spec.world_size)]
    _prefixed(store, spec.generation).multi_set(keys, [f"{number} {digest}"] * len(keys))  # type: ignore[attr-defined]


def await_announcement(store: dist.Store, spec: JoinSpec, rank: int) -> tuple[int, str] | None:
    """The number and the plan's digest of the next broadcast that begins; None when `wake` came instead. Waits for as
    long as the store lives. Raises WireBroken when it does not."""
    prefixed, key = _prefixed(store, spec.generation), _began(rank)
    while True:
        began = time.monotonic()
        try:
            prefixed.wait([key], timedelta(seconds=LISTEN_S))
            said = prefixed.get(key).decode()
            prefixed.delete_key(key)
        except dist.DistStoreError as error:
            if time.monotonic() - began < LISTEN_S / 2:  # not a wait that was too long
                raise WireBroken(str(error)) from error
            continue
        except RuntimeError as error:
            raise WireBroken(str(error)) from error
        number, _, digest = said.partition(" ")
        return (int(number), digest) if said else None


def wake(store: dist.Store, spec: JoinSpec, rank: int) -> None:
    """End this member's own wait for an announcement; `store` is not the client that waits."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and the wait with it
        _prefixed(store, spec.generation).set(_began(rank), "")


def _began(rank: int) -> str:
    return f"began/{rank}"


def watch_store(store: dist.Store, spec: JoinSpec) -> Watch:
    """A watch that breaks the wire once the sender gave up on this group, or its store is gone or silent.

    The store is asked in a thread: torch waits for ever for one that is there and does not answer (a host that froze).
    """
    prefixed, began, why = _prefixed(store, spec.generation), 0.0, ""
    asking: threading.Thread | None = None

    def ask() -> None:
        nonlocal why
        try:
            if prefixed.check(["given_up"]):
                why = prefixed.get("given_up").decode()
        except RuntimeError as error:
            why = str(error) or repr(error)

    def watch() -> None:
        nonlocal asking, began
        if why:
            raise WireBroken(why)
        age = time.monotonic() - began
        if asking is not None and asking.is_alive():
            if age > spec.timeout_s:
                raise WireBroken(f"the sender's store did not answer within {spec.timeout_s:g} s")
        elif age > STORE_POLL_S:
            asking, began = threading.Thread(target=ask, daemon=True, name="weight-store"), time.monotonic()
            asking.start()

    return watch


class Wire:
    """One group, open. Broadcasts are started in order, and made use of in order.

    With nccl the processor runs ahead of the GPU: `order` only makes the current stream wait. It runs RUN_AHEAD buckets
    ahead at most, so that a member that died is noticed before this process waits for the GPU somewhere unwatched.
    """

    def __init__(self, group: Any, spec: JoinSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._group = group
        self._started, self._ordered = deque[Any](), deque[Any]()
        self._on_gpu = spec.backend == "nccl"

    @property
    def in_flight(self) -> int:
        """Broadcasts started whose buffers are not yet ours again."""
        return len(self._started)

    def start(self, buffer: Tensor) -> None:
        """Begin to broadcast `buffer` from rank 0, after what the current stream has queued. Raises WireBroken."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        try:
            self._started.append(self._group.broadcast([buffer], options))
        except RuntimeError as error:
            raise WireBroken(f"broadcast did not start: {error}") from error

    def order(self, watch: Watch) -> None:
        """What is queued (gloo: done) from here on comes after the oldest broadcast in flight. Raises WireBroken."""
        work = self._started.popleft()
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

    def drain(self, watch: Watch) -> None:
        """Wait until every broadcast has left or arrived. Raises WireBroken."""
        while self._started:
            self.order(watch)
        while self._ordered:
            self._finish(self._ordered.popleft(), watch)

    def close(self) -> None:
        """Leave the group, abandoning what is in flight. Hardly blocks: a stuck gloo operation ends by its timeout."""
        if self._group is None:
            return
        held = [self._group, *self._started, *self._ordered]
        if self._on_gpu:
            _abort(self._group)
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
            time.sleep(5e-5 if self._on_gpu else 5e-4)


def open_wire(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device, watch: Watch) -> Wire:
    """Build the group with all its members and send one small broadcast through it, so that its first use is cheap.

    Members first meet in the store, where waiting can be called off, and only then enter the backend's own set-up.
    Raises WireBroken, within spec.timeout_s.
    """
    deadline = time.monotonic() + spec.timeout_s
    prefixed = _prefixed(store, spec.generation)
    _bounded(lambda: _meet(prefixed, spec, rank, watch, deadline), "the meeting of the group", watch, deadline)
    group = _bounded(lambda: _build(prefixed, spec, rank, device), "group set-up", watch, deadline)
    wire = Wire(group, spec, device)
    try:
        wire.start(torch.zeros(16, dtype=torch.uint8, device=buffer_device(spec, device)))
        wire.drain(watch)
    except WireBroken:
        wire.close()
        raise
    return wire


def buffer_device(spec: JoinSpec, device: torch.device) -> torch.device:
    """Where buckets lie: on the GPU for nccl; in host memory for gloo, whatever the model's device."""
    return device if spec.backend == "nccl" else torch.device("cpu")


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`, which other members can reach too."""
    with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _prefixed(store: dist.Store, generation: int) -> dist.PrefixStore:
    return dist.PrefixStore(f"weights/{generation}", store)


def _meet(store: dist.Store, spec: JoinSpec, rank: int, watch: Watch, deadline: float) -> None:
    """Return once every rank of the group has said that it is here."""
    keys = [f"here/{r}" for r in range(spec.world_size)]
    try:
        store.set(keys[rank], "1")
        while not store.check(keys):
            watch()
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(keys) if not store.check([key])]
                raise WireBroken(f"ranks {absent} did not join within {spec.timeout_s:g} s")
            time.sleep(0.002)
    except RuntimeError as error:
        raise WireBroken(str(error)) from error


def _build(store: dist.Store, spec: JoinSpec, rank: int, device: torch.device) -> Any:
    if spec.backend == "nccl":
        return _build_nccl(store, spec, rank, device)
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


def _bounded(step: Callable[[], T], what: str, watch: Watch, deadline: float) -> T:
    """Run a step that cannot be interrupted in a thread of its own, and walk away from it when `watch` says so."""
    done: list[T | WireBroken] = []

    def run() -> None:
        try:
            done.append(step())
        except WireBroken as error:
            done.append(error)
        except RuntimeError as error:
            done.append(WireBroken(f"{what} failed: {error}"))

    thread = threading.Thread(target=run, daemon=True, name="weight-group")
    thread.start()
    while thread.is_alive():
        watch()
        if time.monotonic() > deadline + GRACE_S:
            raise WireBroken(f"{what} did not finish in time")
        thread.join(0.002)
    if not done:
        raise WireBroken(f"{what} died")
    if isinstance(done[0], WireBroken):
        raise done[0]
    return done[0]


def _abort(group: Any) -> None:
    """End NCCL's kernels, also those that wait for a dead peer; not trusted to return."""
    thread = threading.Thread(target=group.abort, daemon=True, name="weight-group-abort")
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        log.warning("NCCL did not abort a weight group within %g s", ABORT_S)


def _let_go(held: list[Any]) -> None:
    """Drop the last references in a thread: gloo's destructor waits for operations that are stuck."""
    thread = threading.Thread(target=held.clear, daemon=True, name="weight-group-end")
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
