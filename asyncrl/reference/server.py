"""A reference process's socket: one ROUTER, owned by one thread that answers at once whatever is being computed.

The computing thread takes jobs out with `next` and puts answers in with `answer`; nothing else is shared. So a rank
that asks after its request is told what goes on while a model is loaded or a long micro-batch is computed, and silence
means a dead process. Computes nothing and knows no model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
import zmq

from asyncrl.reference.messages import (
    Again,
    Envelope,
    Load,
    Packed,
    Pending,
    Refused,
    ReplyEnvelope,
    Score,
    Scored,
    pack_logprobs,
    unpack_request,
    unpack_score,
)
from asyncrl.replay import frames, wire
from asyncrl.replay.keys import CurveKeys, Gate, secure_server
from asyncrl.replay.seal import Damaged, unseal

log = logging.getLogger(__name__)

MAX_OPEN = 1 << 14
"""Micro-batches that wait here at once; more are refused."""
ANSWERS = "inproc://answers"
Key = tuple[str, int]
"""(incarnation, seq) of a Score."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Job:
    """Something to do, in order of arrival: be ready with `model`, and compute `packed` unless it is None."""

    key: Key
    model: str
    temperature: float = 1.0
    packed: Packed | None = None


class ReferenceServer:
    """Binds on construction; its thread serves until `close`."""

    def __init__(self, *, bind: str, curve: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._gate = Gate(self._context, curve) if curve is not None else None
        self._answers = self._context.socket(zmq.PAIR)
        self._answers.bind(ANSWERS)
        router = _router(self._context, curve)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            router.close(0)
            self.close()
            raise ValueError(f"a reference process cannot listen on {bind}: {error}") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._jobs: queue.SimpleQueue[Job | BaseException] = queue.SimpleQueue()
        self._loop = _Loop(self._context, router, self._jobs)
        self._thread = threading.Thread(target=self._run, args=(router,), daemon=True, name="reference-socket")
        self._thread.start()

    def next(self, timeout_s: float) -> Job | None:
        """The oldest job, or None after `timeout_s`. Raises RuntimeError when the socket's thread has ended."""
        try:
            job = self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(job, BaseException):
            raise RuntimeError(f"the reference socket's thread ended: {job!r}") from job
        return job

    def doing(self, what: str) -> None:
        """What ranks that ask are told: `loads the model`, `computes`."""
        if self._loop.doing[0] != what:
            self._loop.doing = (what, time.monotonic())

    def set_ready(self) -> None:
        """The model is there: from now on ranks send micro-batches."""
        self._loop.ready = True

    def answer(self, job: Job, answer: np.ndarray | str) -> None:
        """Log-probabilities, fp32 (T,), or why there are none."""
        body = Refused(message=answer[:4096]) if isinstance(answer, str) else Scored()
        payload = [] if isinstance(answer, str) else [pack_logprobs(answer)]
        message = wire.pack_message(ReplyEnvelope(job.key[1], body), payload)
        self._answers.send_multipart([job.key[0].encode(), str(job.key[1]).encode(), *message])

    def close(self) -> None:
        """End the thread; answers on their way get a moment to leave."""
        if hasattr(self, "_thread"):
            self._answers.send(b"")
            self._thread.join(5.0)
        self._answers.close(0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _run(self, router: zmq.Socket) -> None:
        try:
            self._loop.run()
        except Exception as error:  # the thread's edge: the computing thread must hear of it
            log.exception("reference socket thread")
            self._jobs.put(error)
        finally:
            router.close(linger=1000)


class _Loop:
    """Consumes requests and answers; waits for either; is unblocked by a rank, by `answer` or by `close`; produces jobs
    for the computing thread and replies."""

    def __init__(self, context: zmq.Context, router: zmq.Socket, jobs: queue.SimpleQueue) -> None:
        self._router, self._jobs = router, jobs
        self._answers = context.socket(zmq.PAIR)
        self._answers.connect(ANSWERS)
        self._open: dict[Key, bytes] = {}
        """Scores without an answer -> where their rank can be reached."""
        self.doing, self.ready = ("starts", time.monotonic()), False

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._answers):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._router in ready:
                    self._read()
                if self._answers in ready and not self._pass_on():
                    return
        finally:
            self._answers.close(0)

    def _read(self) -> None:
        """One message. What was damaged or cannot be read is left to its sender, who asks after it."""
        identity, *raw = self._router.recv_multipart(copy=False)
        try:
            header, payload = unseal(cast(list[wire.Frame], raw))
            envelope = unpack_request(header)
        except Damaged:
            return
        except ValueError as error:
            log.warning("a message that cannot be read: %s", error)
            return
        reply = self._handle(identity.bytes, envelope, payload.frames)
        if reply is not None:
            self._send(identity.bytes, wire.pack_message(ReplyEnvelope(envelope.seq, reply)))

    def _handle(self, identity: bytes, envelope: Envelope, payload: Sequence[wire.Frame]) -> Pending | Refused | None:
        key = (envelope.incarnation, envelope.seq)
        match envelope.body:
            case Load(model=model):
                self._jobs.put(Job(key=key, model=model))
                return Pending(ready=self.ready, why=self._why())
            case Again(seqs=seqs):
                unknown = [seq for seq in seqs if (envelope.incarnation, seq) not in self._open]
                for known in set(seqs) - set(unknown):  # the connection may be a new one
                    self._open[envelope.incarnation, known] = identity
                return Pending(ready=self.ready, why=self._why(), unknown=unknown)
            case Score() as score if key not in self._open:
                return self._take(identity, key, score, payload)
        return None

    def _take(self, identity: bytes, key: Key, score: Score, payload: Sequence[wire.Frame]) -> Refused | None:
        if len(self._open) >= MAX_OPEN:
            return Refused(message=f"{MAX_OPEN} micro-batches wait here already: raise training.tokens_per_micro_batch")
        try:
            packed = unpack_score(score, payload)
        except ValueError as error:
            return Refused(message=str(error))
        self._open[key] = identity
        self._jobs.put(Job(key=key, model=score.model, temperature=score.temperature, packed=packed))
        return None

    def _pass_on(self) -> bool:
        """An answer to the rank that asked. False: close() was called."""
        incarnation, *rest = self._answers.recv_multipart()
        if not rest:
            return False
        seq, *message = rest
        identity = self._open.pop((incarnation.decode(), int(seq)), None)
        if identity is not None:
            self._send(identity, cast(list[wire.Frame], message))
        return True

    def _send(self, identity: bytes, message: list[wire.Frame]) -> None:
        with suppress(zmq.ZMQError):  # it is gone, or its connection is: it asks again
            self._router.send_multipart([identity, *frames.join(message)], zmq.NOBLOCK)

    def _why(self) -> str:
        what, since = self.doing
        return f"{what} for {time.monotonic() - since:.0f} s, {len(self._open)} micro-batches here"


def _router(context: zmq.Context, curve: CurveKeys | None) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.RCVHWM, 0)  # what comes is bounded by the ranks' batches, and counted here (MAX_OPEN)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    if curve is not None:
        secure_server(router, curve)
    return router
