"""The replay server's clients: `ReplayClient` blocks (trainer, launcher), `AsyncReplayClient` is asyncio (generators).

One client per process and thread. A request is sent once; while its reply is missing, a small `Again` asks after it,
and the server answers with the reply, with why it has to wait, or with `Resend` when it does not know the request (it
was restarted, or the connection broke). So nothing is lost, nothing is done twice, and a payload is never queued
twice.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from math import inf, nan
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import zmq

from asyncrl.replay import messages, wire
from asyncrl.replay.dealer import LINGER_MS, connect
from asyncrl.replay.keys import CurveKeys
from asyncrl.replay.messages import Lease, Welcome
from asyncrl.replay.seal import unseal
from asyncrl.types import Group

WHY = 300
"""Characters of a drop's explanation that travel."""
ASK_AGAIN_S = 1.0
"""A missing reply is asked after this often."""
SILENCE_S = 120.0
"""Without a sign of life from the server for this long, a request fails."""
MAX_FAULTS = 3
"""A request that could not be read this often was not damaged on the way: it is wrong."""
CONNECT_S = 0.05
"""Until a connection is there, sending is tried this often."""
_POLLIN = int(zmq.POLLIN)  # as an enumeration it takes longer than the call
M = TypeVar("M")


class TakeTimeout(TimeoutError):
    """No batch within the time; the message says who could have ended the wait."""


class ServerSilent(TimeoutError):
    """The replay server has not been heard from for SILENCE_S."""


class Taken(NamedTuple):
    """One batch: `groups` in the order of their prompts; none when the data has ended."""

    groups: list[Group]
    metrics: dict[str, float]


class Session:
    """Numbers the requests of one incarnation. Pure."""

    def __init__(self, role: str, index: int) -> None:
        self.role, self.index = role, index
        self.incarnation = token_hex(8)
        self.next_seq = 0
        self.open: set[int] = set()
        """Requests whose reply is still wanted."""

    def begin(self) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.open.add(seq)
        return seq

    def pack(self, seq: int, body: messages.Request, payload: Sequence[wire.Frame] = ()) -> list[wire.Frame]:
        acked = min(self.open, default=self.next_seq)
        return wire.pack_message(wire.Envelope(self.incarnation, seq, acked, self.role, self.index, body), payload)


class Exchange:
    """One request until its reply: what to send next, and when to give up. Pure, shared by both clients.

    The request is packed once: if it has to be sent again, it still says what was true when it was made.
    """

    def __init__(
        self, session: Session, body: messages.Request, payload: Sequence[wire.Frame], timeout_s: float
    ) -> None:
        self._session, self.seq = session, session.begin()
        self._timeout = TakeTimeout if isinstance(body, messages.Take) else TimeoutError
        self._request = session.pack(self.seq, body, payload)
        self._start = self._heard = time.monotonic()
        self._faults = 0
        self._timeout_s, self._why = timeout_s, "the replay server has not answered at all"
        self.outgoing: list[wire.Frame] | None = self._request
        """To be sent as soon as the socket takes it."""

    def wait_s(self) -> float:
        """How long to wait for a reply now. Raises TakeTimeout, TimeoutError or ServerSilent when it was enough."""
        now = time.monotonic()
        left = self._start + self._timeout_s - now
        if left <= 0:
            raise self._timeout(self._why)
        if now - self._heard >= SILENCE_S:
            raise ServerSilent(f"the replay server has not been heard from for {now - self._heard:.0f} s")
        return min(ASK_AGAIN_S if self.outgoing is None else CONNECT_S, left)

    def nothing_came(self) -> None:
        if self.outgoing is None:
            self.outgoing = self._session.pack(self.seq, messages.Again())

    def hear(self, reply: messages.Reply) -> messages.Reply | None:
        """The final reply, or None when there is more to wait for. Raises when it was refused."""
        self._heard = time.monotonic()
        match reply:
            case messages.Parked(diagnosis=why):
                self._why = why
                return None
            case messages.Resend(fault=fault):
                self._faults += bool(fault)
                if self._faults == MAX_FAULTS:
                    raise ValueError(fault)
                self.outgoing = self._request
                return None
            case messages.Refused(message=message, fatal=fatal):
                raise RuntimeError(message) if fatal else ValueError(message)
        return reply

    def end(self) -> None:
        """Called however the exchange ended: the server may forget it."""
        self._session.open.discard(self.seq)


class ReplayClient:
    """Blocking client. Not for use by several threads: each makes its own."""

    def __init__(self, address: str, *, role: str, index: int = 0, curve: CurveKeys | None = None) -> None:
        self.address, self._session = address, Session(role, index)
        self._context = zmq.Context()
        self._socket = connect(self._context, address, curve)
        self._hello = messages.Hello(pid=os.getpid(), host=socket.gethostname())
        self._greeted = False

    def hello(self) -> Welcome:
        """Say who this is; done before the first request by itself."""
        self._greeted = True
        return self._call(self._hello, Welcome)

    def take(self, *, step: int, num_groups: int, version: int, timeout_s: float) -> Taken:
        """The groups of `step`, to be trained at `version`. Idempotent in `step`. Raises TakeTimeout(diagnosis)."""
        body = messages.Take(step=step, num_groups=num_groups, version=version)
        reply, payload = self._exchange(body, messages.Taken, timeout_s=timeout_s)
        size = wire.FRAMES_PER_GROUP
        groups = [wire.unpack_group(payload[i * size : (i + 1) * size]) for i in range(reply.num_groups)]
        for group in groups:
            _clip_versions(group, version)
        return Taken(groups, reply.metrics)

    def publish(self, *, version: int, step: int) -> None:
        """`version`, made by training `step`, is live on the generators."""
        self._call(messages.Publish(version=version, step=step), messages.Done)

    def rewind(self, *, step: int, version: int) -> None:
        """A trainer starts with `version` from the checkpoint of `step`, or afresh (0, 0). The first of its requests.

        What was used later is available again, what was in flight is leased again. Raises ValueError when the
        journal does not reach back that far.
        """
        self._call(messages.Rewind(step=step, version=version), messages.Done)

    def forget(self, *, step: int) -> None:
        """No checkpoint older than `step` is kept: what was consumed up to it can leave the disk."""
        self._call(messages.Forget(step=step), messages.Done)

    def announce(self, key: str, value: str) -> None:
        """Make an address known to whoever looks `key` up."""
        self._call(messages.Announce(key=key, value=value), messages.Done)

    def lookup(self, key: str, timeout_s: float) -> str:
        """The announced value; waits until there is one. Raises TimeoutError."""
        return self._exchange(messages.Lookup(key=key), messages.Value, timeout_s=timeout_s)[0].value

    def heartbeat(self, activity: dict[str, float], *, waits: str = "") -> bool:
        """Report counters, and for what this process waits ("": nothing). False: the run is finished."""
        return self._call(messages.Heartbeat(activity=activity, waits=waits), messages.Done).accepted

    def finish(self, reason: str) -> None:
        """No more leases: generators are told to end."""
        self._call(messages.Finish(reason=reason), messages.Done)

    def status(self, timeout_s: float = SILENCE_S) -> dict[str, Any]:
        """Ledger, processes, who waits for what and why."""
        return self._exchange(messages.Status(), messages.Report, timeout_s=timeout_s)[0].status

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _call(self, body: messages.Request, expected: type[M]) -> M:
        return self._exchange(body, expected, timeout_s=inf)[0]

    def _exchange(
        self, body: messages.Request, expected: type[M], *, timeout_s: float
    ) -> tuple[M, Sequence[wire.Frame]]:
        """Waits for the reply to one request; unblocked by it, by `timeout_s`, or by SILENCE_S without the server."""
        if not self._greeted:
            self.hello()
        exchange = Exchange(self._session, body, (), timeout_s)
        try:
            while True:
                wait_s = exchange.wait_s()
                if exchange.outgoing is not None and self._try_send(exchange.outgoing):
                    exchange.outgoing = None
                if not self._socket.poll(max(1, int(wait_s * 1000))):
                    exchange.nothing_came()
                    continue
                envelope, payload = self._receive()
                if envelope is not None and envelope.seq == exchange.seq:
                    reply = exchange.hear(envelope.body)
                    if reply is not None:
                        return _expect(reply, expected), payload
        finally:
            exchange.end()

    def _try_send(self, frames: list[wire.Frame]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # not connected (yet, or any more)
            return False
        return True

    def _receive(self) -> tuple[wire.ReplyEnvelope | None, Sequence[wire.Frame]]:
        frames = cast(list[wire.Frame], self._socket.recv_multipart(copy=False))
        try:
            header, payload = unseal(frames)
            return wire.unpack_reply(header), payload.frames
        except ValueError:  # damaged on the way: asking again brings it once more
            return None, []


class Inbox:
    """Replies to one request, for one coroutine that waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._replies: deque[messages.Reply] = deque()
        self._came: asyncio.Future[None] | None = None

    def put(self, reply: messages.Reply) -> None:
        self._replies.append(reply)
        self._wake()

    async def get(self, wait_s: float) -> messages.Reply | None:
        """The next reply, or None after `wait_s`."""
        if not self._replies:
            self._came = self._loop.create_future()
            timer = self._loop.call_later(wait_s, self._wake)
            try:
                await self._came
            finally:
                timer.cancel()
        return self._replies.popleft() if self._replies else None

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)


class AsyncReplayClient:
    """asyncio client: any number of requests at once."""

    def __init__(
        self, address: str, *, role: str = "generator", index: int = 0, curve: CurveKeys | None = None
    ) -> None:
        self.address, self._session = address, Session(role, index)
        self._context = zmq.Context()
        self._socket = connect(self._context, address, curve)
        self._hello = messages.Hello(pid=os.getpid(), host=socket.gethostname())
        self._inboxes: dict[int, Inbox] = {}
        self._held: set[int] = set()
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None

    async def hello(self) -> Welcome:
        """Say who this is. The first request of a generator."""
        return await self._call(self._hello, Welcome)

    async def lookup(self, key: str, timeout_s: float) -> str:
        """The announced value; waits until there is one. Raises TimeoutError."""
        return (await self._call(messages.Lookup(key=key), messages.Value, timeout_s=timeout_s)).value

    async def lease(self, n: int) -> list[Lease]:
        """Between 1 and `n` leases, as soon as there is room for one; [] means that the run is finished."""
        leases = (await self._call(messages.AskLease(n=n), messages.Leases)).leases
        self._held.update(lease.id for lease in leases)
        return leases

    async def insert(self, group: Group) -> bool:
        """True: accepted, and safe whatever crashes. False: the lease had expired; not an error."""
        body = messages.Insert(lease_id=group.lease_id)
        done = await self._call(body, messages.Done, payload=wire.pack_group(group))
        self._held.discard(group.lease_id)
        return done.accepted

    async def drop(
        self,
        lease_id: int,
        reason: str,
        *,
        num_tokens: int = 0,
        reward: float = nan,
        length: float = nan,
        why: str = "",
    ) -> None:
        """The lease ends without a group. `num_tokens` were sampled for nothing; reward and length: means, if known."""
        body = messages.Drop(
            lease_id=lease_id, reason=reason, num_tokens=num_tokens, reward=reward, length=length, why=why[:WHY]
        )
        await self._call(body, messages.Done)
        self._held.discard(lease_id)

    async def heartbeat(self, activity: dict[str, float]) -> None:
        """Report the engine's counters; renews the leases that this client still holds."""
        await self._call(messages.Heartbeat(activity=activity, held=sorted(self._held)), messages.Done)

    async def leave(self) -> None:
        """This generator ends; its leases are free at once."""
        await self._call(messages.Leave(), messages.Done)

    def close(self) -> None:
        """Close the socket at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    async def _call(
        self, body: messages.Request, expected: type[M], *, payload: Sequence[wire.Frame] = (), timeout_s: float = inf
    ) -> M:
        """Waits for the reply to one request; unblocked by it, by `timeout_s`, or by SILENCE_S without the server."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._read)
        exchange = Exchange(self._session, body, payload, timeout_s)
        inbox = self._inboxes[exchange.seq] = Inbox(self._loop)
        try:
            while True:
                wait_s = exchange.wait_s()
                if exchange.outgoing is not None and self._try_send(exchange.outgoing):
                    exchange.outgoing = None
                came = await inbox.get(wait_s)
                if came is None:
                    exchange.nothing_came()
                elif (reply := exchange.hear(came)) is not None:
                    return _expect(reply, expected)
        finally:
            exchange.end()
            del self._inboxes[exchange.seq]

    def _try_send(self, frames: list[wire.Frame]) -> bool:
        try:
            # Copied: a process that ends without closing must not take the memory away from ZeroMQ's thread.
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # not connected (yet, or any more)
            return False
        finally:  # ZeroMQ signals once for all that has come, and sending may have taken the signal
            assert self._loop is not None
            if self._has_come():
                self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        """Put every reply that has come into the inbox of its request."""
        while not self._socket.closed and self._has_come():
            frames = self._socket.recv_multipart()
            try:
                envelope = wire.unpack_reply(unseal(frames)[0])
            except ValueError:  # damaged on the way: asking again brings it once more
                continue
            inbox = self._inboxes.get(envelope.seq)
            if inbox is not None:
                inbox.put(envelope.body)

    def _has_come(self) -> bool:
        return bool(int(cast(int, self._socket.getsockopt(zmq.EVENTS))) & _POLLIN)


def _expect(reply: messages.Reply, expected: type[M]) -> M:
    if not isinstance(reply, expected):
        raise RuntimeError(f"the replay server answered {type(reply).__name__}, expected {expected.__name__}")
    return reply


def _clip_versions(group: Group, version: int) -> None:
    """After a rewind, groups of steps that were lost carry versions that are still to be made again: their lag is 0."""
    for episode in group.episodes:
        np.minimum(episode.versions, version, out=episode.versions)
