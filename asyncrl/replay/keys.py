"""CURVE keys: who may talk to a socket that is not on loopback.

Used by the sockets of `server.py`, `client.py` and the weights' control channel. A key folder holds one pair per
machine role; secrets never leave it and are never logged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """This side's key pair and the server's public key, in Z85 text (40 characters each)."""

    public: str
    secret: str
    server_public: str

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, server_public={self.server_public!r})"
