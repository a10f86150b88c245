"""How other machines reach this one: for the replay server and the weight sender when they listen on a wildcard."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

WILDCARDS = ("0.0.0.0", "*", "[::]")
ELSEWHERE = ("192.0.2.1", 9)
"""A documentation address: connecting a datagram socket only picks a route."""
_SIOCGIFADDR = 0x8915


def reachable(address: str) -> str:
    """`tcp://host:port` as others can use it: a wildcard host becomes this machine's own address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{own_address()}:{port}" if address.startswith("tcp://") and host in WILDCARDS else address


def own_address() -> str:
    """The address of the interface that leads outside. Sends nothing.

    Nodes of a cluster may have no route outside, and a host's name may mean 127.0.1.1: then the first interface that is
    no loopback. 127.0.0.1 where there is none.
    """
    found = chain(_routed(), _named(), _interfaces())
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def _routed() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(ELSEWHERE)
        yield str(probe.getsockname()[0])


def _named() -> Iterator[str]:
    with suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())


def _interfaces() -> Iterator[str]:
    """Linux: the IPv4 address of each interface that has one, in the kernel's order. Elsewhere none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
