"""Why somebody waits, in one line that names who could end it. Pure text from the server's state.

Used by `service.py` for the answer to a parked request, for `status()` and for the error of a wait that was given up.
"""

from __future__ import annotations

from asyncrl.replay import messages
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.peers import Peers

SILENT_S = 10.0
"""A generator or a trainer rank not heard from for this long is named."""


def why(buffer: Buffer, peers: Peers, body: messages.Request, *, name: str, waited_s: float, now: float) -> str:
    """Why this request of `name` has not been answered."""
    match body:
        case messages.Take():
            return why_take_waits(buffer, peers, waited_s=waited_s, now=now)
        case messages.AskLease():
            return why_lease_waits(buffer, name=name, waited_s=waited_s)
        case messages.Hello():
            return f"{name} has waited {waited_s:.0f} s to know whether another process with its --index lives"
        case messages.Lookup(key=key):
            return f"{name} has waited {waited_s:.0f} s for {key!r} to be announced"
    return f"{name} has waited {waited_s:.0f} s"


def why_take_waits(buffer: Buffer, peers: Peers, *, waited_s: float, now: float) -> str:
    """ "trainer has waited 62 s for 3 of 64 groups; generator 1 last heard from 94 s ago; 5 groups in flight, ..." """
    P, missing = buffer.limits.batch_size, buffer.limits.batch_size - len(buffer.buffered)
    parts = [f"trainer has waited {waited_s:.0f} s for {max(missing, 1)} of {P} groups"]
    if missing <= 0:
        parts.append(_behind_whom(buffer))
    parts += _silent(peers, now)
    parts.append(_in_flight(buffer, now))
    if not buffer.leased and missing > 0:
        parts.append(why_no_lease(buffer))
    if buffer.rejected:
        parts.append(f"{buffer.rejected.total()} groups in a row dropped, last reason {list(buffer.rejected)[-1]}")
    return "; ".join(parts)


def why_lease_waits(buffer: Buffer, *, name: str, waited_s: float) -> str:
    """ "generator 0 has waited 5 s for a lease: ..." """
    return f"{name} has waited {waited_s:.0f} s for a lease: {why_no_lease(buffer)}"


def why_no_lease(buffer: Buffer) -> str:
    """What keeps the next lease from being granted."""
    limits = buffer.limits
    if buffer.finished is not None:
        return f"the run is finished ({buffer.finished})"
    if buffer.live_version < 0:
        return "no weights have been published yet"
    if buffer.exhausted and not buffer.waiting:
        return "every prompt of the environment has been leased"
    if buffer.room() > 0:
        return "no generator has asked for one of the leases that are free"
    if limits.last_use is not None and buffer.committed >= limits.last_use:
        return "everything that the remaining steps need has been leased"
    if limits.room(trained=buffer.live_uses, committed=buffer.committed) < 1:
        return (
            f"generation is target_lag {limits.target_lag} ahead of version {buffer.live_version}, the newest live; "
            f"step {buffer.step} is the last that was taken"
        )
    return f"the buffer is full ({len(buffer.buffered)} groups, {buffer.bytes_buffered / 1e6:.0f} MB)"


def _behind_whom(buffer: Buffer) -> str:
    first = next(iter(buffer.line))
    state = "in flight" if first.lease_id in buffer.leased else "waiting to be leased again"
    return (
        f"{len(buffer.buffered)} are buffered, but prompt {first.prompt.id} is {state} and max_lag "
        f"{buffer.limits.max_lag} lets only {buffer.limits.window} leases pass it"
    )


def _silent(peers: Peers, now: float) -> list[str]:
    generators = peers.generators()
    if not generators:
        return ["no generator has said hello yet"]
    silent = [p for p in generators if now - p.last_heard > SILENT_S]
    return [f"{p.name} last heard from {now - p.last_heard:.0f} s ago" for p in silent[:4]]


def _in_flight(buffer: Buffer, now: float) -> str:
    if not buffer.leased:
        return "no group in flight"
    oldest = now - min(s.granted_at for s in buffer.leased.values())
    return f"{len(buffer.leased)} groups in flight, the oldest {oldest:.0f} s"
