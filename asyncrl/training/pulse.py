"""A trainer rank's sign of life: from a thread of its own, so that it does not depend on the collective it may be in.

trainer.py starts one per rank before the ranks join. The replay server compares them and answers which ranks are not
heard from; that goes into the log, and ends this process when the wait for them has had its bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import RankMissing
from asyncrl.replay.messages import Missing

log = logging.getLogger(__name__)
MAX_STALL_S = 10.0
"""Time that one beat may add to this process's clock: while it was stopped itself, nobody else was late."""


class Pulse:
    """`does` is called by the trainer's thread, everything else happens in the pulse's own."""

    def __init__(
        self,
        connect: Callable[[], ReplayClient],
        *,
        size: int,
        every_s: float,
        limit_s: float,
        end: Callable[[BaseException], None],
    ) -> None:
        """`size` ranks belong to the trainer. `end` is called, in the thread, when others are missing for `limit_s`: it
        ends the process, whose other threads may never come back."""
        self._connect, self._size, self._every_s, self._limit_s, self._end = connect, size, every_s, limit_s, end
        self._doing = ("starts", 0)
        self._seen, self._since = self._doing, 0.0
        self._clock, self._looked = 0.0, time.monotonic()
        self._said = Missing()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def does(self, what: str) -> None:
        """The trainer's thread gets on, with this."""
        self._doing = (what, self._doing[1] + 1)

    def close(self) -> None:
        """Say goodbye to the replay server; waits a few seconds for it at most."""
        self._closed.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        """Consumes what the trainer's thread does; waits for the next beat; unblocked by close(); produces beats, lines
        in the log, and the end of this process."""
        client = self._connect()
        try:
            while not self._closed.is_set():
                try:
                    self._hear(client.beat(size=self._size, does=self._doing[0], for_s=self._for_s()))
                except TimeoutError as error:  # the trainer may train on meanwhile; its own requests say so, too
                    self._hear(Missing(why=str(error), for_s=self._for_s()))
                self._closed.wait(self._every_s)
            with suppress(TimeoutError):
                client.leave()
        except (ValueError, RuntimeError) as error:  # another trainer has taken over, or the server ends
            log.warning("%s", error)
        finally:
            client.close()

    def _for_s(self) -> float:
        """How long the trainer's thread has done the same, by a clock that stands still with this process."""
        now = time.monotonic()
        self._clock, self._looked = self._clock + min(now - self._looked, MAX_STALL_S), now
        if self._doing != self._seen:
            self._seen, self._since = self._doing, self._clock
        return self._clock - self._since

    def _hear(self, missing: Missing) -> None:
        """Say it, again when it has lasted twice as long, and once more when it is over."""
        if self._said.why and not missing.why:
            log.info("every rank is heard from again")
            self._said = missing
        elif missing.why and (not self._said.why or missing.for_s >= 2 * self._said.for_s + 1):
            log.warning("%s", missing.why)
            self._said = missing
        if missing.why and missing.for_s >= self._limit_s:
            self._end(RankMissing(missing.why))
