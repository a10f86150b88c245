"""Where reference processes are, by way of the replay server: they announce themselves, the trainer's ranks look.

`Beacon` is in a reference process, `Directory` in a trainer rank. The replay server thereby knows both as processes,
and `asyncrl status` shows who is there, who waits and why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncrl.replay.client import ReplayClient

PREFIX = "reference/"


class Directory:
    """A trainer rank's look at who is there. One thread's own."""

    def __init__(self, client: ReplayClient) -> None:
        self._client = client

    def find(self) -> dict[int, str]:
        """Index -> address of every reference process that is announced now."""
        announced = self._client.hello().announced
        return {int(key.removeprefix(PREFIX)): at for key, at in announced.items() if key.startswith(PREFIX)}

    def tell(self, waits: str) -> None:
        """What this rank waits for, for the terminal and `asyncrl status`; "" ends it."""
        self._client.heartbeat({}, waits=waits)

    def close(self) -> None:
        self._client.close()


class Beacon:
    """Says every `every_s` that a reference process is there; a thread that owns its client."""

    def __init__(
        self,
        connect: Callable[[], ReplayClient],
        *,
        index: int,
        address: str,
        every_s: float,
        activity: Callable[[], dict[str, float]],
    ) -> None:
        self._connect, self._key, self._value = connect, f"{PREFIX}{index}", address
        self._every_s, self._activity = every_s, activity
        self._closed, self._error = threading.Event(), None
        self.finished = False
        """The run is over: nothing more will be asked."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="beacon")
        self._thread.start()

    _error: BaseException | None

    def check(self) -> None:
        """Raise what ended the thread, if something has."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        """Consumes nothing; waits for the next beat; unblocked by close(); produces announcements, and `finished`."""
        try:
            client = self._connect()
            try:
                begun = False
                while not self._closed.is_set() and not self.finished:
                    client.announce(self._key, self._value)  # again and again: a trainer that starts voids them all
                    goes_on = client.heartbeat(self._activity())
                    begun = begun or goes_on  # until its trainer rewinds, a resumed run looks as finished as it was
                    self.finished = begun and not goes_on
                    self._closed.wait(self._every_s)
            finally:
                client.close()
        except Exception as error:  # noqa: BLE001 (the thread's edge: check() raises it)
            self._error = error
