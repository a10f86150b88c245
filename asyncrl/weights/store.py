"""The sender's store, where the members of a weight group meet, hear that a broadcast begins, and that all is over.

Used by the sender (which serves it), by receivers, and by the wire while a group is built. Every wait polls, calls
`watch` between polls and has a bound; whatever goes wrong is a WireBroken. No bytes of weights pass here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from asyncrl.weights.messages import JoinSpec

T = TypeVar("T")
Watch = Callable[[], None]
"""Called between polls; raises WireBroken when there is a reason to stop waiting."""

STORE_POLL_S = 0.05
"""How often a waiting receiver asks whether the sender gave up on the group."""

LISTEN_S = 3600.0
"""How long one wait for an announcement lasts; torch logs each that ends without one."""
GRACE_S = 0.5
"""For a step that keeps the bound itself, and can say who was missing."""

_MARK = "weight wire broken: "


class WireBroken(RuntimeError):
    """The group can carry nothing more: a member died, stalled or was given up; perhaps not this process's fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if reason.startswith(_MARK) else _MARK + reason)


def is_wire_failure(error: BaseException) -> bool:
    """Whether an error is a WireBroken, also after an RPC that kept only its text."""
    return isinstance(error, WireBroken) or _MARK in str(error)


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
    return bounded(connect, what, lambda: None, time.monotonic() + spec.timeout_s)


def give_up(store: dist.Store, generation: int, reason: str) -> None:
    """Tell every member of a group to stop waiting for it (their `watch_store` raises)."""
    prefixed(store, generation).set("given_up", reason)


def announce(store: dist.Store, spec: JoinSpec, number: int, digest: str) -> None:
    """Tell each member of a group that its broadcast `number` (from 0), of the plan with this digest, begins now. One
    key per member, written over: those who do not listen pile up nothing."""
    keys = [_began(rank) for rank in range(1, spec.world_size)]
    prefixed(store, spec.generation).multi_set(keys, [f"{number} {digest}"] * len(keys))  # type: ignore[attr-defined]


def await_announcement(store: dist.Store, spec: JoinSpec, rank: int) -> tuple[int, str] | None:
    """The number and the plan's digest of the next broadcast that begins; None when `wake` came instead. Waits for as
    long as the store lives. Raises WireBroken when it does not."""
    scoped, key = prefixed(store, spec.generation), _began(rank)
    while True:
        began = time.monotonic()
        try:
            scoped.wait([key], timedelta(seconds=LISTEN_S))
            said = scoped.get(key).decode()
            scoped.delete_key(key)
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
        prefixed(store, spec.generation).set(_began(rank), "")


def _began(rank: int) -> str:
    return f"began/{rank}"


def watch_store(store: dist.Store, spec: JoinSpec) -> Watch:
    """A watch that breaks the wire once the sender gave up on this group, or its store is gone or silent.

    The store is asked in a thread: torch waits for ever for one that is there and does not answer (a host that froze).
    """
    scoped, began, why = prefixed(store, spec.generation), 0.0, ""
    asking: threading.Thread | None = None

    def ask() -> None:
        nonlocal why
        try:
            if scoped.check(["given_up"]):
                why = scoped.get("given_up").decode()
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


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`, which other members can reach too."""
    with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def meet(store: dist.Store, spec: JoinSpec, rank: int, watch: Watch, deadline: float) -> None:
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


def bounded(step: Callable[[], T], what: str, watch: Watch, deadline: float) -> T:
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


def prefixed(store: dist.Store, generation: int) -> dist.PrefixStore:
    return dist.PrefixStore(f"weights/{generation}", store)
