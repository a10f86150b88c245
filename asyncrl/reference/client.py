"""A trainer rank's end of the reference processes: asks for a whole batch at once, and for what is lost once more.

Used by training/reference.py, in the rank's own thread: answers gather in the sockets while it trains. Each
micro-batch goes to the process with the least to do; when a process dies or falls silent, what it had is asked of
another. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

import numpy as np
import zmq

from asyncrl.reference.messages import (
    Again,
    Envelope,
    Load,
    Packed,
    Pending,
    Refused,
    Scored,
    pack_score,
    unpack_logprobs,
    unpack_reply,
)
from asyncrl.replay import frames, wire
from asyncrl.replay.dealer import connect
from asyncrl.replay.keys import CurveKeys
from asyncrl.replay.seal import unseal

LOOK_S = 0.25
"""How often a waiting rank looks whether those it waits for are still there."""
FIND_S = 1.0
"""How often it asks where they are, while one is missing."""
SILENT_S = 30.0
"""A process that is connected and answers nothing for this long is given up until it does."""
CONNECT_S = 1.0
"""Longest wait for the first connections, at the start."""
TELL_S = 1.0
"""A longer wait is reported, and as often."""


class WhoIsThere(Protocol):
    """directory.Directory, or a test's own."""

    def find(self) -> dict[int, str]: ...
    def tell(self, waits: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Replica:
    """One reference process as this rank sees it."""

    index: int
    address: str
    socket: zmq.Socket[Any]
    reached: bool = False
    """Its connection stood when last looked at, and it has answered."""
    ready: bool = False
    """It holds the model."""
    heard: float = field(default_factory=time.monotonic)
    why: str = "has not answered yet"
    """What it said last about what it does."""
    open: dict[int, int] = field(default_factory=dict)
    """Micro-batches that it has and has not answered -> their tokens."""

    @property
    def there(self) -> bool:
        """It can be given work."""
        return self.reached and self.ready


@dataclass(slots=True, kw_only=True)
class Question:
    """A micro-batch without an answer."""

    frames: list[wire.Frame]
    cost: int
    num_tokens: int


class ReferenceClient:
    """One rank's. `limit_s` bounds each wait for an answer."""

    def __init__(
        self,
        *,
        model: str,
        rank: int,
        num_replicas: int,
        directory: WhoIsThere,
        limit_s: float,
        curve: CurveKeys | None = None,
    ) -> None:
        self._model, self._rank, self._num_replicas = model, rank, num_replicas
        self._directory, self._limit_s, self._curve = directory, limit_s, curve
        self._context = zmq.Context()
        self._incarnation, self._seq = token_hex(8), 0
        self._replicas: dict[int, Replica] = {}
        self._questions: dict[int, Question] = {}
        self._homeless: list[int] = []
        """Questions that no process has, in order."""
        self._answers: dict[int, np.ndarray] = {}
        self._look_at = self._find_at = 0.0
        self._waited_s, self._num_lost = 0.0, 0

    def start(self) -> None:
        """Let whoever is there load the model. Those that come later are told with the first batch."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            self._turn()
            if all(replica.reached for replica in self._replicas.values()) or time.monotonic() > deadline:
                return

    def ask(self, batch: Sequence[Packed], *, temperature: float) -> Iterator[np.ndarray]:
        """Send a batch's micro-batches on their way; returns at once. The iterator gives each one's log-probabilities,
        fp32 (T,), in order: it waits for replies, at most `limit_s` each, unblocked by any reference process.

        Raises TimeoutError with who could have answered, RuntimeError for what a process refused.
        """
        seqs = [self._add(packed, temperature) for packed in batch]
        self._turn(0.0)
        return (self._wait(seq, seqs) for seq in seqs)

    def figures(self) -> dict[str, float]:
        """Seconds waited since the last call, and micro-batches that had to be asked for again."""
        figures = {"time/reference_wait_s": self._waited_s, "reference/asked_again": float(self._num_lost)}
        self._waited_s, self._num_lost = 0.0, 0
        return figures

    def close(self) -> None:
        """Close the sockets and the directory's at once."""
        self._directory.close()
        for replica in self._replicas.values():
            replica.socket.close(linger=0)
        self._context.term()

    def _add(self, packed: Packed, temperature: float) -> int:
        self._seq += 1
        score, payload = pack_score(packed, model=self._model, temperature=temperature)
        message = wire.pack_message(Envelope(self._incarnation, self._rank, self._seq, score), [payload])
        num_tokens = len(packed.predictors_T)
        self._questions[self._seq] = Question(frames=message, cost=len(packed.token_ids_S), num_tokens=num_tokens)
        self._homeless.append(self._seq)
        return self._seq

    def _wait(self, seq: int, seqs: Sequence[int]) -> np.ndarray:
        began = told = time.monotonic()
        while seq not in self._answers:
            self._turn()
            now = time.monotonic()
            if seq not in self._answers and now - told > TELL_S:
                self._directory.tell(self._why(seqs, now - began))
                told = now
            if now - began > self._limit_s:
                raise TimeoutError(self._why(seqs, now - began))
        self._waited_s += time.monotonic() - began
        if told != began:
            self._directory.tell("")
        return self._answers.pop(seq)

    def _turn(self, wait_s: float = LOOK_S) -> None:
        """Read what has come, at most `wait_s` from now; see who is there; give out what nobody has."""
        self._read(wait_s)
        now = time.monotonic()
        if now >= self._look_at or (self._homeless and wait_s == 0):
            self._look_at = now + LOOK_S
            self._look(now)
        self._give_out()

    def _read(self, wait_s: float) -> None:
        poller = zmq.Poller()
        for replica in self._replicas.values():
            poller.register(replica.socket, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * wait_s)))
        for replica in self._replicas.values():
            while replica.socket in ready:
                try:
                    self._hear(replica, frames.receive(replica.socket))
                except zmq.Again:
                    break
                except ValueError:  # damaged on the way: asking again brings it once more
                    continue

    def _hear(self, replica: Replica, received: list[wire.Frame]) -> None:
        header, payload = unseal(received)
        envelope = unpack_reply(header)
        replica.heard, replica.reached = time.monotonic(), True
        question = self._questions.get(envelope.seq)
        match envelope.body:
            case Scored() if question is not None:  # else: the answer of a process that was given up
                self._answers[envelope.seq] = unpack_logprobs(payload.frames, num_tokens=question.num_tokens)
                self._forget(envelope.seq)
            case Pending(ready=ready, why=why, unknown=unknown):
                replica.ready, replica.why = ready, why
                self._take_back(replica, [seq for seq in unknown if seq in replica.open])
            case Refused(message=message) if question is not None:
                raise RuntimeError(f"reference {replica.index} refused a micro-batch: {message}")

    def _forget(self, seq: int) -> None:
        del self._questions[seq]
        for replica in self._replicas.values():
            replica.open.pop(seq, None)
        if seq in self._homeless:
            self._homeless.remove(seq)

    def _look(self, now: float) -> None:
        """Ask after what is open; what cannot be asked after is lost."""
        for replica in self._replicas.values():
            ask = Again(seqs=list(replica.open)) if replica.open else Load(model=self._model)
            if replica.open or not replica.there:
                reached = self._send(replica, ask)
                if not reached or now - replica.heard > SILENT_S:
                    replica.reached = False
                    self._take_back(replica, list(replica.open))
        present = sum(replica.reached for replica in self._replicas.values())
        if present < self._num_replicas and now >= self._find_at:
            self._find_at = now + FIND_S
            self._find()

    def _find(self) -> None:
        for index, address in self._directory.find().items():
            known = self._replicas.get(index)
            if known is not None and known.address == address:
                continue
            if known is not None:
                known.socket.close(linger=0)
                self._take_back(known, list(known.open))
            socket = connect(self._context, address, self._curve, most_queued=0)  # a batch's micro-batches are few
            self._replicas[index] = Replica(index=index, address=address, socket=socket)

    def _take_back(self, replica: Replica, seqs: Sequence[int]) -> None:
        for seq in seqs:
            del replica.open[seq]
        self._homeless = sorted({*self._homeless, *seqs})
        self._num_lost += len(seqs)

    def _give_out(self) -> None:
        """In order, each to whoever has the fewest tokens open."""
        while self._homeless:
            there = [replica for replica in self._replicas.values() if replica.there]
            if not there:
                return
            replica = min(there, key=lambda r: (sum(r.open.values()), r.index))
            question = self._questions[self._homeless[0]]
            try:
                replica.socket.send_multipart(question.frames, zmq.NOBLOCK)
            except zmq.Again:
                replica.reached = False
                self._take_back(replica, list(replica.open))
                continue
            if not replica.open:
                replica.heard = time.monotonic()  # its silence so far was nobody's question
            replica.open[self._homeless.pop(0)] = question.cost

    def _send(self, replica: Replica, body: Load | Again) -> bool:
        try:
            envelope = Envelope(self._incarnation, self._rank, 0, body)
            replica.socket.send_multipart(wire.pack_message(envelope), zmq.NOBLOCK)
        except zmq.Again:  # not connected (yet, or any more)
            return False
        return True

    def _why(self, seqs: Sequence[int], waited_s: float) -> str:
        left = sum(seq in self._questions for seq in seqs)
        parts = [f"trainer rank {self._rank} has waited {waited_s:.0f} s for reference log-probabilities"]
        parts.append(f"{left} of {len(seqs)} micro-batches are missing")
        now = time.monotonic()
        for index in range(self._num_replicas):
            replica = self._replicas.get(index)
            if replica is None:
                parts.append(f"reference {index} has not announced itself")
            elif replica.reached:
                parts.append(f"reference {index} {replica.why}")
            else:
                parts.append(f"reference {index} cannot be reached, last heard from {now - replica.heard:.0f} s ago")
        return "; ".join(parts)[:4096]
