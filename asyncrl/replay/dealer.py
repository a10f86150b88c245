"""A client's end of a connection: how a DEALER is set up, whoever it talks to.

Used by `client.py` and by the trainer's end of the reference processes.
"""

from __future__ import annotations

from typing import TypeVar

import zmq

from asyncrl.replay import wire
from asyncrl.replay.keys import CurveKeys, secure_client

LINGER_MS = 200
"""What is unsent when a client closes may take this long."""
S = TypeVar("S", bound=zmq.Socket)


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
