"""The replay server process: one ROUTER socket around `service.py`. Single-threaded; it never blocks on one client.

Called by `cli.py` (`--role replay`) and by tests. `serve(run, stop_event)` is the whole process.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import msgspec
import zmq

from asyncrl.config import Config
from asyncrl.curriculum import Curriculum
from asyncrl.fingerprint import fingerprint
from asyncrl.hosts import reachable
from asyncrl.replay import frames, messages, wire
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.journal import Journal
from asyncrl.replay.keys import CurveKeys, Gate, load_keys, secure_server
from asyncrl.replay.limiter import make_limits
from asyncrl.replay.peers import Peers
from asyncrl.replay.samplers import SAMPLERS
from asyncrl.replay.service import Service
from asyncrl.replay.spool import Files
from asyncrl.replay.standing import Standing
from asyncrl.replay.store import Store
from asyncrl.types import Refusal

TURN_MESSAGES = 512
"""Messages handled between two commits and flushes."""
TURN_S = 0.1
"""Longest wait for a message; leases and silences are looked at as often."""
SWEEP_S = 10.0
"""What can be forgotten, and files that dead generators have left, go at least this often."""
MAX_STALL_S = 1.0
"""Time that a turn may add to the server's clock: while the server itself stood still, nobody else was late."""
FORGET_STEPS = 8
"""Without checkpoints, used-up groups leave the disk every this many steps."""
ADDRESS_FILE = "address.json"


class StopEvent(Protocol):
    """threading.Event or multiprocessing.Event."""

    def is_set(self) -> bool: ...


class Server:
    """Binds on construction; `run` serves until told to stop."""

    def __init__(
        self,
        service: Service,
        *,
        bind: str = "tcp://127.0.0.1:*",
        journal: Journal | None = None,
        keep_steps: bool = True,
        curve: CurveKeys | None = None,
    ) -> None:
        """`keep_steps` False: there will be no checkpoint to go back to, so used-up groups leave the disk early."""
        if curve is None:
            _check_bind(bind)
        self.service, self._journal = service, journal
        self._keep_no_steps, self._forgotten = not keep_steps, 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _SOCKET_OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._gate = Gate(self._context, curve) if curve is not None else None
        if curve is not None:
            secure_server(self._socket, curve)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise Refusal(f"the replay server cannot listen on {bind}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        service.connected = self._reaches
        self._clock, self._seen, self._next_tick, self._next_sweep = 0.0, time.monotonic(), 0.0, 0.0

    def run(self, stop: StopEvent) -> None:
        """Consumes requests; waits for any, at most TURN_S; unblocked by a message; produces replies.

        Raises EndlessRejection, StalenessExceeded or NoGenerators, after the client concerned has been told.
        """
        while not stop.is_set():
            self.turn()

    def turn(self) -> None:
        """Handle what has arrived, try what is parked again, look at the time, send the replies."""
        message, handled = self._receive(0), 0  # waits
        now = self._now()
        try:
            while message is not None:
                self.service.handle(bytes(message[0]), message[1:], now)
                handled += 1
                message = self._receive(frames.NOBLOCK) if handled < TURN_MESSAGES else None
            self.service.settle(now)
            if now >= self._next_tick:
                self.service.tick(now)
                self.service.settle(now)
                self._next_tick = now + TURN_S
            if now >= self._next_sweep:
                self._sweep()
                self._next_sweep = now + SWEEP_S
        finally:
            self._commit()
            self._flush()

    def close(self) -> None:
        """Close the socket; unsent replies get a moment to leave."""
        if self._journal is not None:
            self._journal.close()
        self.service.store.close()
        self._socket.close(linger=1000)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _receive(self, flags: int) -> list[wire.Frame] | None:
        """Whose message it is, then its frames; they stay where ZeroMQ has put them."""
        try:
            return frames.receive(self._socket, flags)
        except zmq.Again:
            return None

    def _commit(self) -> None:
        """Before the replies leave: what is acknowledged is safe."""
        if self._journal is not None:
            self._journal.commit(self.service.buffer, self.service.standing)
            if self._keep_no_steps and self.service.buffer.step >= self._forgotten + FORGET_STEPS:
                self._forgotten = self.service.buffer.step
                self._journal.forget(self._forgotten, self.service.buffer)
        self.service.buffer.changes.clear()

    def _sweep(self) -> None:
        if self._journal is not None:
            self._journal.flush()  # what can be forgotten is, before the question who needs which file
        self.service.store.sweep(self.service.buffer, self.service.peers)

    def _flush(self) -> None:
        """Send what was answered. A client that is gone or does not read asks again for what it missed."""
        for identity, message in self.service.outbox:
            try:
                frames.send(self._socket, [identity, *frames.join(message)], copy=False)
            except zmq.ZMQError:
                continue
        self.service.outbox.clear()

    def _reaches(self, identity: bytes) -> bool:
        """Whether a connection stands: ended by its process or by the kernel for it, it takes no message."""
        try:
            frames.send(self._socket, [identity, *_PROBE], copy=True)
        except zmq.Again:  # it does not read, but is there
            return True
        except zmq.ZMQError:
            return False
        return True

    def _now(self) -> float:
        seen = time.monotonic()
        self._clock += min(seen - self._seen, MAX_STALL_S)
        self._seen = seen
        return self._clock


def serve(run: Any, stop_event: StopEvent) -> None:
    """The process: build the service of a resolved run, write `address.json` once it is bound, serve until stopped."""
    config: Config = run.config
    run_dir = Path(config.run_dir or ".")
    server = open_server(run, bind=_former_address(run_dir, config.replay.bind))
    try:
        write_address(run_dir, reachable(server.address))
        server.run(stop_event)
    finally:
        server.close()


def open_server(run: Any, *, bind: str) -> Server:
    """The server of a resolved run (`config`, `env`), with what its journal holds."""
    config: Config = run.config
    curve = load_keys(config.replay.keys, "server")
    journal = (
        Journal(Path(config.run_dir or ".") / "replay", partial(make_buffer, run)) if config.replay.journal else None
    )
    try:
        buffer, standing = journal.restore() if journal else (make_buffer(run, 0), Standing())
    except ValueError as error:
        raise ValueError(
            f"the replay journal cannot be read: {error}; a resume with replay.journal false goes on from the last "
            "checkpoint without it, and then repeats or skips some prompts"
        ) from error

    if journal is None:
        buffer.next_lease = _first_lease()

    def rewind(step: int) -> Buffer:
        if journal is None:
            return make_buffer_at(run, step)
        journal.commit(service.buffer, service.standing)  # what this turn has accepted is going to be acknowledged
        return journal.rewind(step=step)

    service = Service(
        store=_open_store(config, journal),
        buffer=buffer,
        incarnation=token_hex(8),
        peers=Peers(run=fingerprint(config)),
        standing=standing,
        kept=journal is not None,
        run=config.name,
        supervise=config.supervise,
        rewind=rewind,
        forget=journal.forget if journal else lambda step, buffer: None,
    )
    return Server(service, bind=bind, journal=journal, keep_steps=config.checkpoint.every > 0, curve=curve)


def _first_lease() -> int:
    """Without a journal: no number that a former server of the run can have granted, for its generators may live on. It
    started earlier, and nobody grants a million leases a second."""
    return time.time_ns() // 1000


def _open_store(config: Config, journal: Journal | None) -> Store:
    """Groups may lie in files where the configuration and the disk allow it."""
    share = config.replay.share_files
    with suppress(OSError):
        if journal is not None and (share or journal.left.exists()):
            return Store(files=Files(journal.left), recorded=journal.recorded, share=share)
        if journal is None and share:
            return Store(files=Files())
    return Store()


def make_buffer_at(run: Any, step: int) -> Buffer:
    """Without a journal: an empty buffer after `step` steps. What was buffered or in flight is skipped."""
    uses = step * run.config.training.batch_size
    groups = -(-uses // run.config.replay.reuse)
    buffer = make_buffer(run, groups)
    buffer.step, buffer.made_uses, buffer.live_uses = step, uses, uses
    buffer.uses_by_step = {step: uses}
    buffer.ledger.groups.started = buffer.ledger.groups.trained = groups
    return buffer


def make_buffer(run: Any, cursor: int) -> Buffer:
    """An empty buffer that continues the environment's prompts at `cursor`. Raises ValueError on bad settings."""
    replay, generation = run.config.replay, run.config.generation
    curriculum = Curriculum(run.config.curriculum, full_marks=run.env.full_marks)
    return Buffer(
        limits=make_limits(replay, run.config.training),
        prompts=curriculum.filter(iter(run.env.prompts(cursor))),
        curriculum=curriculum,
        cursor=cursor,
        sampler=SAMPLERS[replay.order],
        lease_timeout_s=replay.lease_timeout_s,
        max_lease_s=replay.lease_timeout_s + generation.rollout_timeout_s + generation.reward_timeout_s,
    )


def write_address(run_dir: Path, address: str) -> None:
    """Publish where the server listens, in one atomic step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f".{ADDRESS_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    temporary.replace(run_dir / ADDRESS_FILE)


def read_address(run_dir: Path, *, timeout_s: float = 60.0) -> str:
    """Where the run's server listens; waits until the file is there. Raises TimeoutError."""
    path, deadline = run_dir / ADDRESS_FILE, time.monotonic() + timeout_s
    while True:
        with suppress(FileNotFoundError, msgspec.DecodeError, KeyError):
            return str(msgspec.json.decode(path.read_bytes())["address"])
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replay server has not written {path} within {timeout_s:.0f} s")
        time.sleep(0.05)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a ZeroMQ address."""
    scheme, _, rest = address.partition("://")
    return scheme in ("ipc", "inproc") or rest.startswith(("127.", "localhost:", "[::1]:"))


def _check_bind(bind: str) -> None:
    if not is_loopback(bind):
        raise ValueError(
            f"replay.bind {bind} can be reached from other machines and there are no keys: make them with "
            "`asyncrl keys new FOLDER`, set replay.keys to it, and give every other host a folder of its own "
            "(`asyncrl keys add FOLDER OTHER`)"
        )


def _former_address(run_dir: Path, bind: str) -> str:
    """The address of this run's former server when it is free: clients that still run find a restarted server there."""
    if not bind.endswith(":*") or not (run_dir / ADDRESS_FILE).exists():
        return bind
    former = read_address(run_dir, timeout_s=0)
    host, port = bind.removesuffix(":*"), former.rpartition(":")[2]
    probe = zmq.Context()
    with probe.socket(zmq.ROUTER) as socket:
        try:
            socket.bind(f"{host}:{port}")
        except zmq.ZMQError:
            return bind
        finally:
            socket.close(linger=0)
            probe.term()
    return f"{host}:{port}"


_PROBE = frames.join(wire.pack_message(wire.ReplyEnvelope("", 1 << 53, messages.Parked(diagnosis=""))))
"""Answers no request: clients pass over it."""

_SOCKET_OPTIONS: dict[int, int] = {
    zmq.RCVTIMEO: int(TURN_S * 1000),
    zmq.ROUTER_MANDATORY: 1,  # an unreachable client is an error to handle, not a silent loss
    zmq.MAXMSGSIZE: wire.MAX_FRAME_BYTES,  # longer frames are refused before they are allocated
    zmq.SNDHWM: 64,  # a client that does not read holds at most this many replies here
    zmq.LINGER: 0,
    zmq.HEARTBEAT_IVL: 5000,  # a host that vanished is noticed without waiting for TCP
    zmq.HEARTBEAT_TIMEOUT: 30000,
    zmq.TCP_KEEPALIVE: 1,
}
