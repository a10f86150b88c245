"""Messages of several frames through a ZeroMQ socket, quicker than pyzmq's own: small ones are all about such costs.

Used by the server and its clients. pyzmq combines flags as enumerations and asks after each frame whether more follow;
that is a third of what a small message costs a process (bench.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq
from zmq.backend import Socket as _Backend

from asyncrl.replay.seal import Frame

NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_send: Callable[..., object] = _Backend.send
_recv: Callable[..., Any] = _Backend.recv


def send(socket: zmq.Socket[Any], frames: Sequence[Frame], *, copy: bool = True) -> None:
    """All frames or none, at once. Raises zmq.Again when the socket does not take them now."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        _send(socket, frame, NOBLOCK if i == last else NOBLOCK | _MORE, copy)


def receive(socket: zmq.Socket[Any], flags: int = NOBLOCK) -> list[Frame]:
    """The frames of one message, which stay where ZeroMQ has put them. Raises zmq.Again when none has come."""
    frame = _recv(socket, flags, False)
    frames: list[Frame] = [frame]
    while frame.more:
        frame = _recv(socket, flags, False)
        frames.append(frame)
    return frames


def keep(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of a message that may be sent again, the last one moved to ZeroMQ's own memory. Sending it copies
    nothing, and its sender packs the next group where this one was: in memory that the processor still has at hand."""
    with memoryview(frames[-1]) as last:  # the new frame holds on to what it was made of, so to no more than this
        kept = zmq.Frame(last, copy=True)
    return [*frames[:-1], cast(Frame, kept)]


def has_come(socket: zmq.Socket[Any]) -> bool:
    """Whether a message waits."""
    return bool(int(cast(int, socket.getsockopt(_EVENTS))) & _POLLIN)
