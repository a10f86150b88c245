"""A client's end of a connection: how a DEALER is set up, whoever it talks to, and how it follows one that moves.

Used by `client.py` and by the trainer's end of the reference processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import zmq

from asyncrl.replay import wire
from asyncrl.replay.keys import CurveKeys, secure_client

log = logging.getLogger(__name__)
MOVED_S = 5.0
"""A server that has been silent for this long may have been started again elsewhere."""
LOOK_EVERY_S = 1.0
LINGER_MS = 200
"""What is unsent when a client closes may take this long."""
S = TypeVar("S", bound=zmq.Socket)
Address = str | Callable[[], str]
"""Where a server listens: fixed, or to be read anew when it falls silent."""


class Whereabouts:
    """The address that a client is connected to."""

    def __init__(self, address: Address) -> None:
        """Raises what reading the address raises."""
        self._read = None if isinstance(address, str) else address
        self.now = address if isinstance(address, str) else address()
        self._next_look = 0.0

    def follow(self, dealer: zmq.Socket[Any], *, silent_s: float) -> str:
        """Where the server is, to which `dealer` is then connected. What was sent to the former one is asked after."""
        now = time.monotonic()
        if self._read is None or silent_s < MOVED_S or now < self._next_look:
            return self.now
        self._next_look = now + LOOK_EVERY_S
        with suppress(OSError):  # none is written now
            found = self._read()
            if found != self.now:
                log.warning("the replay server at %s is silent; it is looked for at %s now", self.now, found)
                dealer.disconnect(self.now)
                dealer.connect(found)
                self.now = found
        return self.now


def connect(context: zmq.Context[S], address: str, curve: CurveKeys | None, *, most_queued: int = 1000) -> S:
    """A DEALER for `address`. It takes a message only while the connection stands: zmq.Again tells of a lost one, or
    that `most_queued` messages (0: no bound) have not left yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDHWM, most_queued)
    dealer.setsockopt(zmq.LINGER, LINGER_MS)  # also when it is collected unclosed: its context waits for what is unsent
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue only for a server that is there; see frames.py
    dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if curve is not None:
        secure_client(dealer, curve)
    dealer.connect(address)
    return dealer
