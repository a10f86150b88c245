"""The trainer's end of the control messages: one ROUTER socket, owned by one background thread on trainer rank 0.

The sender puts messages in and takes events out through queues; nothing else is shared. A peer whose process ends or
stops answering ZeroMQ's own heartbeats becomes a `Gone` event, whatever it was doing. Decides nothing about syncs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.replay.keys import CurveKeys, Gate, secure_server
from asyncrl.weights.members import Gone
from asyncrl.weights.messages import ToGenerator, ToTrainer, decode_to_trainer, encode

log = logging.getLogger(__name__)


class Crashed(msgspec.Struct, frozen=True):
    """The control thread itself ended; nothing further comes."""

    reason: str


Event = tuple[str, ToTrainer | Gone, float]
"""Whose, what, and when it came (monotonic clock)."""


class Control:
    """Messages to and from generators, by peer name (their routing id)."""

    def __init__(self, bind: str, *, timeout_s: float, curve: CurveKeys | None = None) -> None:
        if not is_loopback(bind) and curve is None:
            raise ValueError(
                f"weights.bind is {bind}, which other machines can reach: that needs CURVE keys "
                "(`asyncrl keys new FOLDER`, replay.keys FOLDER), or bind to 127.0.0.1"
            )
        self._context = zmq.Context()
        self._events: queue.SimpleQueue[tuple[str, ToTrainer | Gone | Crashed, float]] = queue.SimpleQueue()
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.bind("inproc://outbox")
        self._gate = Gate(self._context, curve) if curve is not None else None
        router = _router(self._context, timeout_s, curve)
        try:
            router.bind(bind)
        except zmq.ZMQError as error:
            router.close(0)
            raise ValueError(f"weights.bind: the trainer cannot listen on {bind}: {error}") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, args=(router,), daemon=True, name="weight-control")
        self._thread.start()

    def send(self, peer: str, message: ToGenerator) -> None:
        """Queue a message; a peer that cannot be reached becomes a Gone event."""
        self._outbox.send_multipart([peer.encode(), *encode(message)])

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`. Raises RuntimeError when the control thread has ended."""
        try:
            peer, event, when = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Crashed):
            self._events.put((peer, event, when))
            raise RuntimeError(f"the weight sender's control thread ended: {event.reason}")
        return peer, event, when

    def close(self) -> None:
        """End the thread and free the port."""
        self._outbox.send(b"")
        self._thread.join(5.0)
        self._outbox.close(0)
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(0)

    def _run(self, router: zmq.Socket) -> None:
        try:
            _Loop(self._context, router, self._events).run()
        except Exception as error:  # the thread's edge: the publishing thread must hear of it
            log.exception("weight control thread")
            self._events.put(("", Crashed(repr(error)), time.monotonic()))
        finally:
            router.close(0)


class _Loop:
    """Consumes the ROUTER, its monitor and the outbox; waits for any of them; is unblocked by a peer, by the sender,
    or by close(); produces events, and messages to peers."""

    def __init__(self, context: zmq.Context, router: zmq.Socket, events: queue.SimpleQueue) -> None:
        self._router, self._events = router, events
        self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outbox = context.socket(zmq.PAIR)
        self._outbox.connect("inproc://outbox")
        self._peers: dict[int, str] = {}  # file descriptor of the connection -> routing id

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._monitor, self._outbox):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._monitor in ready:
                    self._read_monitor()
                if self._router in ready:
                    self._read_peer()
                if self._outbox in ready and not self._send():
                    return
        finally:
            self._router.disable_monitor()
            self._outbox.close(0)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            peer = self._peers.pop(int(event["value"]), None)
            if peer is not None and peer not in self._peers.values():
                self._events.put((peer, Gone("connection lost"), time.monotonic()))

    def _read_peer(self) -> None:
        frames = self._router.recv_multipart(copy=False)
        self._read_monitor()  # a descriptor is used again only after its former end was reported: hear of that first
        peer, payload = frames[0].bytes.decode(errors="replace"), [frame.bytes for frame in frames[1:]]
        try:
            message = decode_to_trainer(payload)
        except ValueError as error:
            log.warning("refused a message from %s: %s", peer, error)
            return
        self._peers[int(frames[-1].get(zmq.SRCFD))] = peer
        self._events.put((peer, message, time.monotonic()))

    def _send(self) -> bool:
        frames = self._outbox.recv_multipart()
        if len(frames) == 1:
            return False
        try:
            self._router.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:  # EHOSTUNREACH: no such peer; EAGAIN: it reads nothing
            self._events.put((frames[0].decode(), Gone(f"cannot be reached: {error}"), time.monotonic()))
        return True


def is_loopback(address: str) -> bool:
    """Whether a ZeroMQ address can only be reached from this machine."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    return not address.startswith("tcp://") or host in ("localhost", "::1") or host.startswith("127.")


def heartbeat(socket: zmq.Socket, timeout_s: float) -> None:
    """Let ZeroMQ notice a silent peer within half a stage's bound; its I/O thread answers however busy Python is."""
    limit_ms = int(1000 * min(timeout_s / 2, 30.0))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(limit_ms // 4, 50))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, limit_ms)
    socket.setsockopt(zmq.LINGER, 0)


def _router(context: zmq.Context, timeout_s: float, curve: CurveKeys | None) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    heartbeat(router, timeout_s)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.MAXMSGSIZE, 16 << 20)
    if curve is not None:
        secure_server(router, curve)
    return router
