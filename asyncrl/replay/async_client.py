"""`AsyncReplayClient`: the replay server's asyncio client (generators), any number of requests at once.

The same protocol as `client.py`. One timer for all open requests: a request costs the loop one future and no task.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, nan
from typing import TypeVar, cast

import zmq

from asyncrl.replay import frames, messages, spool, wire
from asyncrl.replay.dealer import LINGER_MS, Address, Whereabouts, connect
from asyncrl.replay.exchange import Exchange, Session, expect
from asyncrl.replay.keys import CurveKeys
from asyncrl.replay.messages import Lease, Welcome
from asyncrl.replay.seal import unseal
from asyncrl.types import Group

WHY = 300
"""Characters of a drop's explanation that travel."""
M = TypeVar("M")


@dataclass(slots=True)
class Open:
    """A request that waits for its reply."""

    exchange: Exchange
    came: asyncio.Future[messages.Reply]
    due: float = 0.0
    """When it is looked at if nothing comes (the loop's clock)."""


class AsyncReplayClient:
    """asyncio client: any number of requests at once."""

    def __init__(
        self,
        address: Address,
        *,
        role: str = "generator",
        index: int = 0,
        curve: CurveKeys | None = None,
        run: Mapping[str, str] | None = None,
    ) -> None:
        """`run`: the fingerprint of this process's configuration; a server of another run refuses it."""
        self._where = Whereabouts(address)
        self._session = Session(role, index, self._where.now)
        self._context = zmq.Context()
        self._socket = connect(self._context, self._where.now, curve)
        self._hello = messages.Hello(pid=os.getpid(), host=socket.gethostname(), run=dict(run or {}))
        self._open: dict[int, Open] = {}
        """By sequence number."""
        self._held: set[int] = set()
        self._files: spool.Writer | None = None
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._will_read = False

    @property
    def address(self) -> str:
        """The server's, as far as is known."""
        return self._session.address

    async def hello(self) -> Welcome:
        """Say who this is. The first request of a generator."""
        welcome = await self._call(self._hello, Welcome)
        if self._files is None and (folder := spool.accept(welcome.offer)) is not None:
            with suppress(OSError):
                self._files = spool.Writer(folder, self._session.incarnation)
        return welcome

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
        frames_ = wire.pack_group(group)
        place = self._leave(frames_)
        call = self._insert(group, frames_) if place is None else self._refer(group, place)
        del frames_  # else they would wait here for the reply
        done = await call
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

    async def heartbeat(self, activity: dict[str, float]) -> bool:
        """Report the engine's counters; renews the leases that this client still holds. False: the run is finished."""
        body = messages.Heartbeat(activity=activity, held=sorted(self._held))
        return (await self._call(body, messages.Done)).accepted

    async def leave(self) -> None:
        """This generator ends; its leases are free at once."""
        await self._call(messages.Leave(), messages.Done)

    def close(self) -> None:
        """Close the socket at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._leave_no_more()
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _leave(self, frames_: Sequence[wire.Frame]) -> messages.Place | None:
        """Write a group to a file, if that is possible."""
        with suppress(OSError):  # a full disk, say
            return self._files.append(frames_) if self._files is not None else None
        return None

    def _leave_no_more(self) -> None:
        if self._files is not None:
            self._files.close()
        self._files = None

    async def _refer(self, group: Group, place: messages.Place) -> messages.Done:
        """Insert a group that lies in a file. When the server does not find it there, the socket carries it."""
        files = self._files
        assert files is not None
        try:
            done = await self._insert(group, place=place)
        except ValueError:
            self._leave_no_more()
            return await self._insert(group, wire.pack_group(group))
        files.answered(place)
        return done

    async def _insert(
        self, group: Group, frames_: Sequence[wire.Frame] = (), *, place: messages.Place | None = None
    ) -> messages.Done:
        """Either way the insert asks which segments can be written over: on a full disk nothing else would."""
        files, unused = self._files, list[int]()
        full = files.ask() if files is not None else []
        body = messages.Insert(lease_id=group.lease_id, place=place, full=full)
        call = self._call(body, messages.Done, payload=frames_)
        del frames_  # else they would wait here for the reply
        try:
            done = await call
            unused = done.unused
            return done
        finally:
            if files is not None:
                files.told(full, unused)

    async def _call(
        self, body: messages.Request, expected: type[M], *, payload: Sequence[wire.Frame] = (), timeout_s: float = inf
    ) -> M:
        """Waits for the reply to one request; unblocked by it, by `timeout_s`, or by SILENCE_S without the server."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._read)
        exchange = Exchange(self._session, body, payload, timeout_s)
        if payload:
            exchange.request = exchange.outgoing = frames.keep(exchange.request)
            del payload  # else it would wait here for the reply
        open_ = self._open[exchange.seq] = Open(exchange, self._loop.create_future())
        try:
            self._go_on(open_, self._loop)
            return expect(await open_.came, expected)
        finally:
            exchange.end()
            del self._open[exchange.seq]

    def _go_on(self, open_: Open, loop: asyncio.AbstractEventLoop) -> None:
        """Send what there is to send, and have the request looked at again in time."""
        exchange = open_.exchange
        if exchange.outgoing is not None and self._try_send(exchange.outgoing, loop):
            exchange.outgoing = None
        try:
            open_.due = loop.time() + exchange.wait_s()
        except TimeoutError as error:
            open_.came.set_exception(error)
            return
        self._look_by(open_.due, loop)

    def _look_by(self, due: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with the requests that have waited long enough."""
        self._timer, now = None, loop.time()
        waiting = [o for o in self._open.values() if not o.came.done()]
        for open_ in waiting:
            if open_.due <= now:
                open_.exchange.nothing_came()
                self._session.address = self._where.follow(self._socket, silent_s=open_.exchange.silent_s())
                self._go_on(open_, loop)
        if waiting:
            self._look_by(min(o.due for o in waiting), loop)

    def _try_send(self, frames_: list[wire.Frame], loop: asyncio.AbstractEventLoop) -> bool:
        try:
            # Copied: a process that ends without closing must not take the memory away from ZeroMQ's thread.
            frames.send(self._socket, frames_)
        except zmq.Again:  # not connected (yet, or any more)
            return False
        finally:  # ZeroMQ signals once for all that has come, and sending may have taken the signal
            if not self._will_read and frames.has_come(self._socket):
                self._will_read = True
                loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        """Hand every reply that has come to its request."""
        self._will_read = False
        while not self._socket.closed and frames.has_come(self._socket):
            try:
                envelope = wire.unpack_reply(unseal(frames.receive(self._socket))[0])
            except ValueError:  # damaged on the way: asking again brings it once more
                continue
            if (open_ := self._open.get(envelope.seq)) is not None and not open_.came.done():
                self._hear(open_, envelope.body)

    def _hear(self, open_: Open, reply: messages.Reply) -> None:
        assert self._loop is not None
        try:
            final = open_.exchange.hear(reply)
        except (ValueError, RuntimeError) as error:
            open_.came.set_exception(error)
            return
        if final is None:
            self._go_on(open_, self._loop)
        else:
            open_.came.set_result(final)
