"""How other machines reach this one: for the replay server and the weight sender when they listen on a wildcard."""

from __future__ import annotations

import socket

WILDCARDS = ("0.0.0.0", "*", "[::]")


def reachable(address: str) -> str:
    """`tcp://host:port` as others can use it: a wildcard host becomes this machine's own address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{own_address()}:{port}" if address.startswith("tcp://") and host in WILDCARDS else address


def own_address() -> str:
    """The address of the interface that leads outside; the host's name may mean 127.0.1.1. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: connecting a datagram socket only picks a route
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
