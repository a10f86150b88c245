"""Messages of several frames through a ZeroMQ socket, quicker than pyzmq's own: small ones are all about such costs.

Used by the servers and their clients. Answers travel as one frame each: of several, libzmq 4.3.5 ends the process that
is reading them (`fq.cpp:80: !_more`) when the connection breaks between two, if its socket is IMMEDIATE. pyzmq combines
flags as enumerations and asks after each frame whether more follow; that is a third of what a small message costs a
process (bench.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import zmq
from zmq.backend import Socket as _Backend

from asyncrl.replay.seal import Frame

NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_send: Callable[..., object] = _Backend.send
_recv: Callable[..., Any] = _Backend.recv
_JOINED = b"JOIN"
_NUM = struct.Struct("<4sI")
JOINED_BYTES = 32 << 20
"""Beyond, both ends would get new pages from the kernel for each (a third of the throughput at 4 MB a group), and are
exposed to libzmq as before."""
_ALIGNMENT = 8
"""Arrays in a frame stay aligned, so that nobody has to copy them."""


def send(socket: zmq.Socket[Any], frames: Sequence[Frame], *, copy: bool = True) -> None:
    """All frames or none, at once. Raises zmq.Again when the socket does not take them now."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        _send(socket, frame, NOBLOCK if i == last else NOBLOCK | _MORE, copy)


def receive(socket: zmq.Socket[Any], flags: int = NOBLOCK) -> list[Frame]:
    """The frames of one message, which stay where ZeroMQ has put them. Raises zmq.Again when none has come, and
    ValueError when they were joined and it cannot be seen how."""
    frame = _recv(socket, flags, False)
    frames: list[Frame] = [frame]
    while frame.more:
        frame = _recv(socket, flags, False)
        frames.append(frame)
    return frames if len(frames) > 1 else split(frame)


def join(frames: Sequence[Frame]) -> Sequence[Frame]:
    """A message of several frames as one, for `receive`: their lengths, then each from a multiple of 8 bytes on. One
    that is longer than JOINED_BYTES stays as it is."""
    lengths = [memoryview(f).nbytes for f in frames]
    if len(frames) == 1 or sum(lengths) > JOINED_BYTES:
        return frames
    parts: list[Frame] = [struct.pack(f"<4sI{len(frames)}Q", _JOINED, len(frames), *lengths)]
    for frame, length in zip(frames, lengths, strict=True):
        parts += (frame, bytes(-length % _ALIGNMENT))
    return [b"".join(parts)]


def split(frame: Frame) -> list[Frame]:
    """The frames that were joined, as views; any other frame alone. Raises ValueError."""
    view = memoryview(frame)
    if view[: len(_JOINED)] != _JOINED:
        return [frame]
    try:
        num = _NUM.unpack_from(view)[1]
        lengths = struct.unpack_from(f"<{num}Q", view, _NUM.size) if num <= view.nbytes // 8 else ()
    except struct.error as error:
        raise ValueError(f"a joined message was cut short: {error}") from error
    starts = list(accumulate((n + -n % _ALIGNMENT for n in lengths), initial=_NUM.size + 8 * num))
    if starts.pop() != view.nbytes or not lengths:
        raise ValueError(f"a joined message of {num} frames does not have the {view.nbytes} bytes that came")
    return [view[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def keep(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of a message that may be sent again, the last one moved to ZeroMQ's own memory. Sending it copies
    nothing, and its sender packs the next group where this one was: in memory that the processor still has at hand."""
    with memoryview(frames[-1]) as last:  # the new frame holds on to what it was made of, so to no more than this
        kept = zmq.Frame(last, copy=True)
    return [*frames[:-1], cast(Frame, kept)]


def has_come(socket: zmq.Socket[Any]) -> bool:
    """Whether a message waits."""
    return bool(int(cast(int, socket.getsockopt(_EVENTS))) & _POLLIN)
