"""`ReplayClient`: the replay server's blocking client (trainer, launcher). Generators have `async_client.py`.

One client per process and thread. A request is sent once; while its reply is missing, a small `Again` asks after it,
and the server answers with the reply, with why it has to wait, or with `Resend` when it does not know the request (it
was restarted, or the connection broke). So nothing is lost, nothing is done twice, and a payload is never queued
twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq

from asyncrl.replay import frames, messages, wire
from asyncrl.replay.dealer import LINGER_MS, Address, Whereabouts, connect
from asyncrl.replay.exchange import SILENCE_S, Exchange, Session, expect
from asyncrl.replay.keys import CurveKeys
from asyncrl.replay.messages import Welcome
from asyncrl.replay.seal import unseal
from asyncrl.replay.spool import accept, gather
from asyncrl.types import Group

M = TypeVar("M")


class Taken(NamedTuple):
    """One batch: `groups` in the order of their prompts; none when the data has ended."""

    groups: list[Group]
    metrics: dict[str, float]


class Asked(NamedTuple):
    """A batch that was asked for."""

    exchange: Exchange
    body: messages.Take
    timeout_s: float


class Packed(NamedTuple):
    """A batch as it came."""

    reply: messages.Taken
    frames: Sequence[wire.Frame]
    version: int

    @property
    def num_groups(self) -> int:
        return self.reply.num_groups

    def unpack(self) -> Taken:
        """The groups, whose arrays are views of the frames. After a rewind some carry versions of steps that were lost
        and are still to be made again: their lag is 0."""
        cuts = [
            slice(start, start + wire.FRAMES_PER_GROUP) for start in range(0, len(self.frames), wire.FRAMES_PER_GROUP)
        ]
        groups = [wire.unpack_group(self.frames[cut], newest=self.version) for cut in cuts]
        return Taken(groups, self.reply.metrics)


class ReplayClient:
    """Blocking client. Not for use by several threads: each makes its own."""

    def __init__(
        self,
        address: Address,
        *,
        role: str,
        index: int = 0,
        curve: CurveKeys | None = None,
        run: Mapping[str, str] | None = None,
        silence_s: Callable[[], float] | None = None,
    ) -> None:
        """`run`: the fingerprint of this process's configuration; a server of another run refuses it. `silence_s`: for
        how long the server may be silent, asked again and again; default SILENCE_S."""
        self._where = Whereabouts(address)
        self._session = Session(role, index, self._where.now, silence_s)
        self._context = zmq.Context()
        self._socket = connect(self._context, self._where.now, curve)
        self._hello = messages.Hello(pid=os.getpid(), host=socket.gethostname(), run=dict(run or {}))
        self._greeted = False
        self._folder: Path | None = None
        """Where groups may lie in files."""

    @property
    def address(self) -> str:
        """The server's, as far as is known."""
        return self._session.address

    def hello(self, timeout_s: float = inf) -> Welcome:
        """Say who this is; done before the first request by itself."""
        self._greeted = True
        welcome = self._await(Exchange(self._session, self._hello, (), timeout_s), Welcome)[0]
        self._folder = accept(welcome.offer)
        return welcome

    def take(self, *, step: int, num_groups: int, version: int, timeout_s: float) -> Taken:
        """The groups of `step`, to be trained at `version`. Idempotent in `step`. Raises TakeTimeout(diagnosis)."""
        return self.receive(self.ask(step=step, num_groups=num_groups, version=version, timeout_s=timeout_s)).unpack()

    def ask(self, *, step: int, num_groups: int, version: int, timeout_s: float) -> Asked:
        """The first half of `take`: send the request. No other request until it is answered."""
        self._greet(timeout_s)
        by_place = self._folder is not None
        return self._ask(messages.Take(step=step, num_groups=num_groups, version=version, by_place=by_place), timeout_s)

    def _ask(self, body: messages.Take, timeout_s: float) -> Asked:
        exchange = Exchange(self._session, body, (), timeout_s)
        self._go_on(exchange)
        return Asked(exchange, body, timeout_s)

    def receive(self, asked: Asked) -> Packed:
        """The second half: wait for the batch. Raises as `take` does."""
        reply, payload = self._await(asked.exchange, messages.Taken)
        if reply.places and self._folder is not None:
            try:
                payload = gather(self._folder, reply.places, payload)
            except ValueError:  # the folder has gone: from now on through the socket
                self._folder = None
                body = msgspec.structs.replace(asked.body, by_place=False)
                return self.receive(self._ask(body, asked.timeout_s))
        return Packed(reply, payload, asked.body.version)

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

    def beat(self, *, size: int, does: str, for_s: float) -> messages.Missing:
        """This rank of a trainer of `size` lives and `does` the same for `for_s`. Which ranks are not heard from?"""
        body = messages.Beat(size=size, pid=self._hello.pid, host=self._hello.host, does=does, for_s=for_s)
        return self._call(body, messages.Missing)

    def finish(self, reason: str) -> None:
        """No more leases: generators are told to end."""
        self._call(messages.Finish(reason=reason), messages.Done)

    def status(self, timeout_s: float = SILENCE_S) -> dict[str, Any]:
        """Ledger, processes, who waits for what and why."""
        return self._exchange(messages.Status(), messages.Report, timeout_s=timeout_s)[0].status

    def leave(self) -> None:
        """This process asks nothing more, and is no longer shown."""
        self._call(messages.Leave(), messages.Done)

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _call(self, body: messages.Request, expected: type[M]) -> M:
        return self._exchange(body, expected, timeout_s=inf)[0]

    def _exchange(
        self, body: messages.Request, expected: type[M], *, timeout_s: float
    ) -> tuple[M, Sequence[wire.Frame]]:
        self._greet(timeout_s)
        return self._await(Exchange(self._session, body, (), timeout_s), expected)

    def _greet(self, timeout_s: float) -> None:
        if not self._greeted:
            self.hello(timeout_s)

    def _go_on(self, exchange: Exchange) -> None:
        """Send what there is to send."""
        if exchange.outgoing is not None and self._try_send(exchange.outgoing):
            exchange.outgoing = None

    def _await(self, exchange: Exchange, expected: type[M]) -> tuple[M, Sequence[wire.Frame]]:
        """Waits for one reply; unblocked by it, by its time's end, or by SILENCE_S without the server."""
        try:
            while True:
                self._go_on(exchange)
                wait_s = exchange.wait_s()
                if not self._socket.poll(max(1, int(wait_s * 1000))):
                    exchange.nothing_came()
                    self._session.address = self._where.follow(self._socket, silent_s=exchange.silent_s())
                    continue
                envelope, payload = self._receive()
                if envelope is not None and envelope.seq == exchange.seq:
                    reply = exchange.hear(envelope.body)
                    if reply is not None:
                        return expect(reply, expected), payload
        finally:
            exchange.end()

    def _try_send(self, message: list[wire.Frame]) -> bool:
        try:
            frames.send(self._socket, message)
        except zmq.Again:  # not connected (yet, or any more)
            return False
        return True

    def _receive(self) -> tuple[wire.ReplyEnvelope | None, Sequence[wire.Frame]]:
        try:
            header, payload = unseal(frames.receive(self._socket))
            return wire.unpack_reply(header), payload.frames
        except ValueError:  # damaged on the way: asking again brings it once more
            return None, []
