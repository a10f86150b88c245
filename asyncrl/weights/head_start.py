"""A receiver's head start: the first buckets travel while its engine still runs the step it is in.

Used by `receiver.py` in engines that take a while to pause: vLLM ends its step first, and an H200 could have received
gigabytes meanwhile. A thread waits for the sender's announcement in the store and starts as many broadcasts as there
are buffers; it never loads anything. If the engine does not come for them, the group is left, and nobody waits in it.

Not for engines of several workers: their own collectives run on the same GPUs, and two groups that wait for each
other's kernels can lock each other out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from asyncrl.weights.messages import JoinSpec
from asyncrl.weights.store import STORE_POLL_S, WireBroken, await_announcement, connect_store, wake, watch_store


class HeadStart:
    """One thread beside one open group, from `join` to `leave`."""

    def __init__(
        self,
        spec: JoinSpec,
        rank: int,
        store: dist.Store,
        *,
        begin: Callable[[int, str], bool],
        claimed: Callable[[int], bool],
        abandon: Callable[[str], None],
    ) -> None:
        """`rank` is this member's in the group, `store` a client of which others make use too. `begin(number, digest)`
        starts the first buckets of that broadcast and says whether it did; `claimed(number)` whether the engine has
        come for them; `abandon(reason)` leaves the group."""
        self._spec, self._rank, self._store = spec, rank, store
        self._begin, self._claimed, self._abandon = begin, claimed, abandon
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="weights-head-start").start()

    def end(self) -> None:
        """The group is closed. Waits neither for the thread nor for the store, which may be frozen."""
        self._over.set()
        threading.Thread(target=wake, args=(self._store, self._spec, self._rank), daemon=True).start()

    def _run(self) -> None:
        try:
            store = connect_store(self._spec)  # its own: a wait holds a client's connection
            while not self._over.is_set():
                heard = await_announcement(store, self._spec, self._rank)
                if heard is not None and self._begin(*heard):
                    self._wait_for_engine(store, heard[0])
        except WireBroken as error:
            if not self._over.is_set():
                self._abandon(str(error))

    def _wait_for_engine(self, store: dist.Store, number: int) -> None:
        """Waits for the engine to take over the broadcast that was begun, at most the bound of a stage. Raises
        WireBroken when it does not, or when the sender gave up."""
        watch = watch_store(store, self._spec)
        deadline = time.monotonic() + self._spec.timeout_s
        while not self._over.is_set() and not self._claimed(number):
            watch()
            if time.monotonic() > deadline:
                raise WireBroken(f"the engine did not come for its weights within {self._spec.timeout_s:g} s")
            time.sleep(STORE_POLL_S)
