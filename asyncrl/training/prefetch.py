"""The next batch, asked for while the present one is trained.

Rank 0 owns one Prefetch. Its thread has a replay client of its own. A batch is asked for by its step and the version
that will train it (step - 1), so asking early changes nothing about its age.
"""

from __future__ import annotations

import queue
import threading

from asyncrl.replay.client import Asked, ReplayClient, Taken


class Prefetch:
    """Asks for one batch at a time, in order. `begin` and `poll` are called by one thread, the trainer's."""

    def __init__(self, client: ReplayClient, *, num_groups: int, limit_s: float) -> None:
        """`client` is the thread's from now on. `limit_s` bounds the wait for one batch; beyond it `poll` raises
        TakeTimeout with the server's diagnosis."""
        self._client, self._num_groups, self._limit_s = client, num_groups, limit_s
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Taken | BaseException] = queue.SimpleQueue()
        # A daemon: a wait for groups that never come must not hold up the end of the process.
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Ask for the batch of `step` as soon as the one before has come; returns at once."""
        self._steps.put(step)

    def poll(self, timeout_s: float) -> Taken | None:
        """The batch asked for, or None when it is not there after `timeout_s`. Raises what asking for it raised."""
        try:
            result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ask for nothing more. Does not wait for a request under way."""
        self._steps.put(None)

    def _work(self) -> None:
        """Consumes steps; waits for the replay server's batch, at most limit_s; unblocked by it or by its failure;
        produces a batch or the exception, once per step, until the data has ended. The next step, if it is known when
        a batch arrives, is asked for before that batch is unpacked: it travels meanwhile."""
        try:
            step, asked = self._steps.get(), None
            while step is not None:
                packed = self._client.receive(asked or self._ask(step))
                asked, early = None, packed.num_groups and not self._steps.empty()
                if early and (step := self._steps.get()) is not None:
                    asked = self._ask(step)
                self._results.put(packed.unpack())
                if not packed.num_groups:
                    return
                if not early:
                    step = self._steps.get()
        except Exception as error:  # noqa: BLE001 (a thread's boundary: the trainer's thread raises it)
            self._results.put(error)
        finally:  # here: a client that is collected unclosed can wait for its own socket for ever
            self._client.close()

    def _ask(self, step: int) -> Asked:
        return self._client.ask(step=step, num_groups=self._num_groups, version=step - 1, timeout_s=self._limit_s)
