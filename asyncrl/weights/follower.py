"""The control plane of weight syncs in a generator: says hello, and does with the engine what the trainer asks for.

Run as one asyncio task of the generator process. It never touches the bytes of weights (the engine's ranks receive
those) and never leaves an engine between receive and commit: whatever ends the task, what was received is discarded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from asyncrl.config import WeightsConfig
from asyncrl.replay.keys import CurveKeys, secure_client
from asyncrl.types import EngineDead
from asyncrl.weights.control import heartbeat
from asyncrl.weights.messages import (
    Commit,
    Committed,
    Discard,
    Failed,
    FailedStage,
    Go,
    Hello,
    JoinSpec,
    PlanSpec,
    Prepare,
    Ready,
    ToGenerator,
    ToTrainer,
    decode_to_generator,
    encode,
)
from asyncrl.weights.plan import buckets, digest
from asyncrl.weights.store import is_wire_failure

if TYPE_CHECKING:
    from asyncrl.generation.engine import Engine

log = logging.getLogger(__name__)

Order = Prepare | Go | Commit

HELLO_S = 1.0
"""How often an idle generator says hello: what makes a restarted or absent-minded trainer know it again."""
LAST_WORDS_S = 0.1
"""For a message that came before the connection ended."""
MAX_FAILURES = 3
"""Failed syncs in a row after which the generator gives up and is restarted."""


async def follow(
    address: str,
    engine: Engine,
    *,
    index: int,
    incarnation: str,
    config: WeightsConfig,
    on_version: Callable[[int], None],
    curve: CurveKeys | None = None,
) -> None:
    """Follow the trainer's weight sender at `address` until cancelled.

    Consumes control messages; waits for the next one, saying hello each second meanwhile; is unblocked by the trainer
    (also by one that vanished and came back); produces engine calls and answers. `on_version(version)` is called once
    the engine serves it. Raises EngineDead when the engine cannot go on, RuntimeError after MAX_FAILURES failed syncs
    in a row.
    """
    follower = _Follower(engine, index, incarnation, config, on_version)
    context = zmq.asyncio.Context()
    follower.socket = _dealer(context, address, f"{index}-{incarnation}", config.timeout_s, curve)
    follower.lost = follower.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        while True:
            await follower.turn()
    except EngineDead:
        follower.pending = False  # nothing is left that could serve
        raise
    finally:
        follower.socket.disable_monitor()
        context.destroy(0)
        if follower.pending:
            await follower.abandon()


class _Follower:
    """What one generator knows of the sync it is in."""

    socket: zmq.asyncio.Socket
    lost: zmq.asyncio.Socket
    """Has a message for each connection that ended."""

    def __init__(self, engine: Engine, index: int, incarnation: str, config: WeightsConfig,
                 on_version: Callable[[int], None]) -> None:  # fmt: skip
        self._engine, self._index, self._incarnation = engine, index, incarnation
        self._config, self._on_version = config, on_version
        self._prepared: Prepare | None = None
        self._plan: PlanSpec | None = None  # the one agreed to last
        self._joined: JoinSpec | None = None  # the group that the engine is in
        self._current = 0  # the attempt that was neither served nor discarded
        self._served = 0  # the attempt that brought what the engine serves
        self._checksums: list[int] | None = None
        self._receiving: asyncio.Future[list[bytes]] | None = None
        self._receive_s = self._pause_before_s = 0.0
        self._failures = 0
        self.pending = False
        """The engine has received, perhaps only in part, what was neither committed nor discarded."""

    async def turn(self) -> None:
        """One message, or one hello."""
        if self.pending:
            message = await self._next_in_sync()
        else:
            while await self.lost.poll(0):  # what ended before this sync is of no interest in it
                await self.lost.recv_multipart()
            await self._say(Hello(index=self._index, incarnation=self._incarnation, version=self._engine.version,
                                  num_ranks=self._engine.num_weight_ranks, attempt=self._served))  # fmt: skip
            message = await self._next(HELLO_S)
        if message is not None:
            await self._act(message)

    async def _next_in_sync(self) -> ToGenerator | None:
        """The next message. None, with what was received discarded, when the trainer is gone or falls silent."""
        bound_s, gone = self._config.timeout_s * 2, False
        if not self._receive_next().done():  # else it came while the engine received
            lost = asyncio.ensure_future(self.lost.poll(int(bound_s * 1000)))
            either: set[asyncio.Future[Any]] = {self._receive_next(), lost}
            await asyncio.wait(either, timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
            gone = lost.done() and bool(lost.result())
            lost.cancel()
        message = await self._next(LAST_WORDS_S)
        if message is None:
            what = "the connection to the trainer ended" if gone else f"the trainer was silent for {bound_s:g} s"
            await self._discard(f"{what} between broadcast and commit")
        return message

    async def _act(self, message: ToGenerator) -> None:
        match message:
            case Prepare():
                self._current = message.attempt
                await self._prepare(message)
            case Go():
                self._current = message.attempt
                await self._go(message)
            case Commit():
                await self._commit(message)
            case Discard(reason=reason) if self._current:  # otherwise it serves, or was discarded already
                await self._discard(reason)

    async def _prepare(self, message: Prepare) -> None:
        self._prepared, self._checksums = None, None
        plan = message.plan or self._plan
        if plan is None or plan.digest != message.digest:
            await self._fail(message, "prepare", "the trainer refers to a plan that it has not sent")
        elif message.plan is not None and digest(plan) != plan.digest:
            await self._fail(message, "prepare", "the plan does not match its own digest: another asyncrl?")
        else:
            self._plan, self._prepared = plan, message
            await self._say(Ready(version=message.version, attempt=message.attempt, digest=plan.digest))

    async def _go(self, message: Go) -> None:
        """Join the group if it is a new one, then receive; the engine pauses only for the latter."""
        prepared, plan, self._checksums = self._prepared, self._plan, None
        told = (message.generation, message.digest)
        if prepared is None or plan is None or (prepared.spec.generation, plan.digest) != told:
            await self._fail(message, "prepare", "was told to go without having been prepared")
            return
        if self._joined != prepared.spec:
            self._joined = None
            if not await self._attempt(message, "join", self._engine.join_weights(prepared.spec)):
                return
            self._joined = prepared.spec
        self._pause_before_s, began = self._engine.activity()["pause_s"], time.perf_counter()
        self.pending = True
        self._receive_next()  # the commit follows the last bucket, and may be here before the engine has loaded it
        if await self._attempt(message, "load", self._receive(prepared.spec, plan)):
            self._receive_s = time.perf_counter() - began

    async def _receive(self, spec: JoinSpec, plan: PlanSpec) -> None:
        bound_s = spec.timeout_s * (1 + len(buckets(plan)))
        try:
            async with asyncio.timeout(bound_s):
                self._checksums = await self._engine.receive_weights(plan)
        except TimeoutError as error:
            raise EngineDead(f"the engine is stuck in a broadcast for more than {bound_s:g} s") from error

    async def _commit(self, message: Commit) -> None:
        """Serve what was received if it is what was sent. After a failure the trainer says what becomes of it."""
        ours, theirs = self._checksums, message.checksums
        if message.attempt != self._current:
            await self._fail(message, "commit", "was told to serve what it has discarded or never received")
            return
        if ours is None:  # its failure has been told
            return
        if ours != theirs:
            wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
            reason = (
                f"buckets {wrong} of {len(theirs)} differ from what was sent"
                if wrong
                else (f"received {len(ours)} buckets of {len(theirs)}")
            )
            await self._fail(message, "checksum", reason)
            return
        began = time.perf_counter()
        if not await self._attempt(message, "commit", self._engine.commit_weights(message.version)):
            return
        self.pending, self._failures, load_s = False, 0, time.perf_counter() - began
        self._current, self._served, self._checksums = 0, message.attempt, None
        self._on_version(message.version)
        pause_s = self._engine.activity()["pause_s"] - self._pause_before_s
        await self._say(Committed(version=message.version, attempt=message.attempt, pause_s=pause_s,
                                  wire_s=self._receive_s, load_s=load_s))  # fmt: skip

    async def _discard(self, reason: str) -> None:
        """Drop what was received. Raises EngineDead if the old weights are gone, RuntimeError on too many failures."""
        self._current, self._checksums, self._prepared = 0, None, None
        self._failures += 1
        log.warning("generator %d discards a weight sync (%d in a row): %s", self._index, self._failures, reason)
        if self.pending:
            self.pending = False
            await self._engine.discard_weights()
        if self._failures >= MAX_FAILURES:
            raise RuntimeError(
                f"generator {self._index}: {self._failures} weight syncs failed in a row; last: {reason}"
            )

    async def abandon(self) -> None:
        """Discard at the end of the task. An engine that dies of it says so to its next caller: that is not why the
        task ends, and at the end of a run there is none."""
        try:
            await self._engine.discard_weights()
        except EngineDead as error:
            log.warning("generator %d ends amid a weight sync: %s", self._index, error)

    async def _attempt(self, order: Order, stage: FailedStage, step: Awaitable[None]) -> bool:
        """Await an engine call; a failure that leaves the engine alive is told to the trainer."""
        try:
            await step
        except EngineDead as error:
            await self._fail(order, stage, str(error))
            raise
        except Exception as error:  # noqa: BLE001  the engine's edge (also an RPC's): the trainer decides what follows
            self._joined = None
            await self._fail(order, "wire" if stage == "load" and is_wire_failure(error) else stage, repr(error))
            return False
        return True

    async def _fail(self, order: Order, stage: FailedStage, reason: str) -> None:
        log.warning("generator %d, version %d: %s failed: %s", self._index, order.version, stage, reason)
        await self._say(Failed(version=order.version, attempt=order.attempt, stage=stage, reason=reason))

    async def _say(self, message: ToTrainer) -> None:
        await self.socket.send_multipart(encode(message))

    async def _next(self, timeout_s: float) -> ToGenerator | None:
        """The next message, or None after `timeout_s`. A receive goes on over calls: to cancel one may lose what it has
        just got."""
        done, _ = await asyncio.wait({self._receive_next()}, timeout=timeout_s)
        if not done:
            return None
        frames, self._receiving = self._receive_next().result(), None
        return decode_to_generator(frames)

    def _receive_next(self) -> asyncio.Future[list[bytes]]:
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self.socket.recv_multipart())
        return self._receiving


def _dealer(
    context: zmq.asyncio.Context, address: str, name: str, timeout_s: float, curve: CurveKeys | None
) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    heartbeat(socket, timeout_s)
    socket.setsockopt(zmq.ROUTING_ID, name.encode())
    socket.setsockopt(zmq.SNDHWM, 16)
    if curve is not None:
        secure_client(socket, curve)
    socket.connect(address)
    return socket
