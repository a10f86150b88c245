"""A thread between ZeroMQ sockets that forwards badly: late, twice, out of order, damaged, not at all. Seeded."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import zmq

RATES = {"drop": 0.06, "damage": 0.08, "duplicate": 0.10, "delay": 0.15}
MAX_DELAY_S = 0.3
"""A delayed message is overtaken by those that follow it."""


class Proxy(threading.Thread):
    """Clients connect to `address`; each gets a connection of its own to the server behind."""

    def __init__(self, server: str, *, seed: int) -> None:
        super().__init__(name="proxy", daemon=True)
        self.faults: Counter[str] = Counter()
        self._rng, self._order = random.Random(seed), count()
        self._server, self._context, self._ended = server, zmq.Context(), threading.Event()
        self._front = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._behind: dict[bytes, zmq.Socket] = {}
        self._late: list[tuple[float, int, Callable[[list[bytes]], None], list[bytes]]] = []

    def run(self) -> None:
        """Consumes messages of either side; waits for one, or for the time of a late one; produces what is left."""
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._ended.is_set():
            for socket, _ in poller.poll(10):
                frames = socket.recv_multipart()
                if socket is self._front:
                    self._pass(self._to_server(frames[0], poller), frames[1:])
                else:
                    client = next(i for i, s in self._behind.items() if s is socket)
                    self._pass(lambda f, i=client: self._front.send_multipart([i, *f]), frames)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, send, frames = heapq.heappop(self._late)
                send(frames)
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._ended.set()
        self.join(10)

    def _to_server(self, client: bytes, poller: zmq.Poller) -> Callable[[list[bytes]], None]:
        if client not in self._behind:
            self._behind[client] = self._context.socket(zmq.DEALER)
            self._behind[client].connect(self._server)
            poller.register(self._behind[client], zmq.POLLIN)
        return self._behind[client].send_multipart

    def _pass(self, send: Callable[[list[bytes]], None], frames: list[bytes]) -> None:
        (fault,) = self._rng.choices([*RATES, "none"], [*RATES.values(), 1 - sum(RATES.values())])
        if fault == "none":
            send(frames)
            return
        self.faults[fault] += 1
        if fault == "damage":
            send(self._damaged(frames))
        if fault == "duplicate":
            send(frames)
        if fault in ("duplicate", "delay"):
            due = time.monotonic() + MAX_DELAY_S * self._rng.random()
            heapq.heappush(self._late, (due, next(self._order), send, frames))

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        """One byte flipped, or the end of a frame lost, or a frame lost."""
        which = self._rng.choice([i for i, f in enumerate(frames) if f])
        frame, at = bytearray(frames[which]), self._rng.randrange(len(frames[which]))
        match self._rng.choice(["flip", "flip", "cut", "lose"]):
            case "flip":
                frame[at] ^= self._rng.randint(1, 255)
            case "cut":
                del frame[at:]
            case "lose":
                return frames[:which] + frames[which + 1 :] or [b""]
        return [*frames[:which], bytes(frame), *frames[which + 1 :]]


@contextmanager
def badly(server: str, *, seed: int) -> Iterator[Proxy]:
    """A proxy in front of `server`."""
    proxy = Proxy(server, seed=seed)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
