"""CURVE keys: who may talk to a socket that is not on loopback, and whom a client may believe.

Used by the sockets of `server.py` and `client.py` and by the weights' control channel. `asyncrl keys new FOLDER` makes

    FOLDER/server.key      the servers' pair (replay server, weight sender); secret, for the hosts that run them
    FOLDER/server.public   what a client checks the server against
    FOLDER/client.key      a client's pair; secret
    FOLDER/allowed         public keys of the clients that are let in, one per line, read at each connection

and `asyncrl keys add FOLDER OTHER` makes a folder for one more host: its own client.key and server.public, no server's
secret; its public key is added to FOLDER/allowed. Taking a line out of `allowed` keeps that host out. Keys are Z85 text
as libzmq makes them. Secrets are never logged, printed or sent.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"asyncrl"
NAMED = 64
"""Hosts turned away that the log names, once each."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CurveKeys:
    """The keys of one end, Z85, 40 bytes each."""

    public: bytes
    secret: bytes
    server: bytes
    """The server's public key."""
    allowed: Path | None = None
    """On a server: the file that lists the clients' public keys."""

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


def new_keys(folder: Path) -> None:
    """Make server and client pairs and the allow-list. Raises ValueError when there are keys already."""
    if (folder / "server.key").exists() or (folder / "client.key").exists():
        raise ValueError(f"{folder} holds keys already; remove the folder to make new ones")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    server_public = _new_pair(folder / "server.key")
    (folder / "server.public").write_bytes(server_public + b"\n")
    client_public = _new_pair(folder / "client.key")
    (folder / "allowed").write_bytes(b"# clients that are let in, one public key per line\n" + client_public + b"\n")


def add_client(folder: Path, other: Path) -> None:
    """Make the folder of one more client of the servers whose keys are in `folder`."""
    server_public = _read(folder / "server.public")
    if (other / "client.key").exists():
        raise ValueError(f"{other} holds keys already; choose another folder")
    other.mkdir(parents=True, exist_ok=True, mode=0o700)
    (other / "server.public").write_bytes(server_public + b"\n")
    public = _new_pair(other / "client.key")
    with open(folder / "allowed", "ab") as allowed:
        allowed.write(public + b"\n")


def load_keys(folder: str | Path | None, end: Literal["server", "client"]) -> CurveKeys | None:
    """The keys of one end; None without a folder. Raises ValueError when they are missing or others can read them."""
    if folder is None:
        return None
    folder = Path(folder)
    path = folder / f"{end}.key"
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"{path} can be read by other users: chmod 600 {path}")
    public, secret = [*_read(path).split(), b"", b""][:2]
    keys = (public, secret, _read(folder / "server.public"))
    if any(len(k) != 40 for k in keys):
        raise ValueError(f"{path} is not a key file of `asyncrl keys new`")
    allowed = folder / "allowed" if end == "server" else None
    return CurveKeys(public=public, secret=secret, server=keys[2], allowed=allowed)


def secure_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Before connect: encrypt, prove who this is, and insist on the right server."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.server


def secure_server(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Before bind: accept CURVE connections only, and none while no Gate decides."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Gate:
    """Lets in the clients on the allow-list (ZeroMQ's ZAP, RFC 27). One per context; make it before binding."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        assert keys.allowed is not None, "a server's keys name the allow-list"
        self._allowed = keys.allowed
        self.refused = 0
        """Connections turned away so far."""
        self._named: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curve-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop deciding; from now on nobody is let in."""
        self._closed.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        """Consumes: libzmq's questions. Waits for: one, 0.1 s at a time. Unblocked by: close(). Produces: verdicts."""
        while not self._closed.is_set():
            if self._socket.poll(100):
                self._socket.send_multipart(self._verdict(self._socket.recv_multipart()))
        self._socket.close()

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, host, _, mechanism, *credentials = [*request, *[b""] * 6][: max(7, len(request))]
        key = credentials[0] if credentials else b""
        if (
            domain == DOMAIN
            and mechanism == b"CURVE"
            and len(key) == 32
            and z85.encode(key) in allowed_keys(self._allowed)
        ):
            return [version, request_id, b"200", b"OK", z85.encode(key), b""]
        self.refused += 1
        if host not in self._named and len(self._named) < NAMED:
            self._named.add(host)
            log.warning("a client at %s is turned away: its key has no line in %s", host.decode(), self._allowed)
        return [version, request_id, b"400", b"key not allowed", b"", b""]


def allowed_keys(path: Path) -> set[bytes]:
    """The public keys in an allow-list; none when the file is missing."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return set()
    return {line.strip() for line in lines if len(line.strip()) == 40 and not line.startswith(b"#")}


def _new_pair(path: Path) -> bytes:
    public, secret = zmq.curve_keypair()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
    return public


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{path} is missing: make keys with `asyncrl keys new {path.parent}`") from error
