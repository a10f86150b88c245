"""One request until its reply, without its socket: what to send next, and when to give up. Pure but for the clock.

Used by both clients, `client.py` and `async_client.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from secrets import token_hex
from typing import TypeVar

from asyncrl.replay import messages, wire

ASK_AGAIN_S = 1.0
"""A missing reply is asked after this often."""
SILENCE_S = 120.0
"""Without a sign of life from the server for this long, a request fails."""
MAX_FAULTS = 3
"""A request that could not be read this often was not damaged on the way: it is wrong."""
CONNECT_S = 0.05
"""Until a connection is there, sending is tried this often."""
M = TypeVar("M")


class TakeTimeout(TimeoutError):
    """No batch within the time; the message says who could have ended the wait."""


class ServerSilent(TimeoutError):
    """The replay server has not been heard from for SILENCE_S."""


class NoPlace(ValueError):
    """Another process has this one's place in the run; the message says which."""


class RankMissing(RuntimeError):
    """A rank of the trainer has not been heard from for supervise.stall_limit_s, and this one waits for it."""


class Session:
    """Numbers the requests of one incarnation. Pure."""

    def __init__(self, role: str, index: int, address: str, silence_s: Callable[[], float] | None = None) -> None:
        """`silence_s`: how long a request may be without a sign of life from the server, now; default SILENCE_S."""
        self.role, self.index, self.address = role, index, address
        self.silence_s = silence_s or (lambda: SILENCE_S)
        self.heard = False
        """The server has answered at least once."""
        self.incarnation = _process(os.getpid()) + token_hex(4)
        self.next_seq = 0
        self.open: set[int] = set()
        """Requests whose reply is still wanted."""

    def begin(self) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.open.add(seq)
        return seq

    def why_silent(self, for_s: float) -> str:
        """One line for the end of a wait: what happened, and where to look."""
        if self.heard:
            return (
                f"the replay server at {self.address} has not been heard from for {for_s:.0f} s: it has ended or this "
                "host cannot reach it any more; its log says which"
            )
        return (
            f"the replay server at {self.address} has not answered within {for_s:.0f} s: it does not run, this host "
            "cannot reach that address, or the keys do not match (replay.keys here and there; `allowed` there)"
        )

    def pack(self, seq: int, body: messages.Request, payload: Sequence[wire.Frame] = ()) -> list[wire.Frame]:
        acked = min(self.open, default=self.next_seq)
        return wire.pack_message(wire.Envelope(self.incarnation, seq, acked, self.role, self.index, body), payload)


class Exchange:
    """One request until its reply.

    The request is packed once: if it has to be sent again, it still says what was true when it was made.
    """

    def __init__(
        self, session: Session, body: messages.Request, payload: Sequence[wire.Frame], timeout_s: float
    ) -> None:
        self._session, self.seq = session, session.begin()
        self._timeout = TakeTimeout if isinstance(body, messages.Take) else TimeoutError
        self.request = session.pack(self.seq, body, payload)
        self._start = self._heard = time.monotonic()
        self._faults = 0
        self._timeout_s, self._why = timeout_s, "the replay server has not answered at all"
        self.outgoing: list[wire.Frame] | None = self.request
        """To be sent as soon as the socket takes it."""

    def wait_s(self) -> float:
        """How long to wait for a reply now. Raises TakeTimeout, TimeoutError or ServerSilent when it was enough."""
        now = time.monotonic()
        left = self._start + self._timeout_s - now
        if left <= 0:
            raise self._timeout(self._why)
        if now - self._heard >= self._session.silence_s():
            raise ServerSilent(self._session.why_silent(now - self._heard))
        return min(ASK_AGAIN_S if self.outgoing is None else CONNECT_S, left)

    def silent_s(self) -> float:
        """How long nothing has been heard."""
        return time.monotonic() - self._heard

    def nothing_came(self) -> None:
        if self.outgoing is None:
            self.outgoing = self._session.pack(self.seq, messages.Again())

    def hear(self, reply: messages.Reply) -> messages.Reply | None:
        """The final reply, or None when there is more to wait for. Raises when it was refused."""
        self._heard, self._session.heard = time.monotonic(), True
        match reply:
            case messages.Parked(diagnosis=why):
                self._why = why
                return None
            case messages.Resend(fault=fault):
                self._faults += bool(fault)
                if self._faults == MAX_FAULTS:
                    raise ValueError(fault)
                self.outgoing = self.request
                return None
            case messages.Refused(message=message, no_place=True):
                raise NoPlace(message)
            case messages.Refused(message=message, fatal=fatal):
                raise RuntimeError(message) if fatal else ValueError(message)
        return reply

    def end(self) -> None:
        """Called however the exchange ended: the server may forget it."""
        self._session.open.discard(self.seq)


@cache
def _process(pid: int) -> str:
    """The digits of one process; a fork is another one."""
    return token_hex(wire.PROCESS_DIGITS // 2)


def expect(reply: messages.Reply, expected: type[M]) -> M:
    """The reply, if it is of the kind that answers the request. Raises RuntimeError."""
    if not isinstance(reply, expected):
        raise RuntimeError(f"the replay server answered {type(reply).__name__}, expected {expected.__name__}")
    return reply
