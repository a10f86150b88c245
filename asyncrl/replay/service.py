"""The replay server without its socket: requests in, replies out. Pure but for `store.py`: the time is an argument.

Called by `server.py`, once per message (`handle`), then once per turn (`settle`, `tick`); its `outbox` is sent after
the journal has committed. Owns the buffer. Never blocks: a request that cannot be answered yet is parked and tried
again after each change. Every request is answered once; a repeated one gets the same reply again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config import SuperviseConfig
from asyncrl.replay import diagnosis, messages, ranks, wire
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.ledger import MAX_REASONS, EndlessRejection, Means
from asyncrl.replay.parcel import Parcel
from asyncrl.replay.peers import Peer, Peers
from asyncrl.replay.report import describe
from asyncrl.replay.seal import Damaged, Payload, unseal
from asyncrl.replay.standing import Standing, why_taken
from asyncrl.replay.store import Store

Outgoing = tuple[bytes, list[wire.Frame]]
FORGET_AFTER_S = 600.0
"""A process that holds nothing and is silent for this long is forgotten."""

_NOTHING = Payload((), ())


class NoGenerators(RuntimeError):
    """The trainer waits and no generator has been alive for the time that a run may go on without one."""


@dataclass(slots=True)
class Waiting:
    """A request that is being answered, perhaps parked."""

    peer: Peer
    envelope: wire.Envelope
    since: float

    @property
    def seq(self) -> int:
        return self.envelope.seq

    @property
    def body(self) -> messages.Request:
        return self.envelope.body


@dataclass(slots=True, kw_only=True)
class Service:
    """One run's server. `incarnation` is this start of the server."""

    buffer: Buffer
    incarnation: str
    run: str = "run"
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    rewind: Callable[[int], Buffer]
    """step -> the buffer as a trainer that resumes from that step's checkpoint finds it."""
    forget: Callable[[int, Buffer], None]
    """No checkpoint before this step is kept: groups used up by then may leave the disk."""
    connected: Callable[[bytes], bool] = lambda identity: True
    """Whether the connection of an identity stands."""
    store: Store = field(default_factory=Store)
    peers: Peers = field(default_factory=Peers)
    parked: dict[tuple[str, int], Waiting] = field(default_factory=dict)
    standing: Standing = field(default_factory=Standing)
    kept: bool = True
    """Buffer and standing outlive this server."""
    earned: Means = field(default_factory=Means)
    """Rewards of all groups that came to a good end since the last batch was taken, filtered ones included."""
    why_dropped: dict[str, str] = field(default_factory=dict)
    """reason -> what the last drop for it said."""
    outbox: list[Outgoing] = field(default_factory=list)
    granted: bool = False
    """Some lease, by this server."""
    malformed: int = 0
    """Messages that could not be read."""
    last_fault: str = ""
    started_at: float | None = None
    without_generators_since: float | None = None

    def handle(self, identity: bytes, frames: Sequence[wire.Frame], now: float) -> None:
        """One message of one client. Raises what ends the run.

        What was damaged is counted and ignored, its sender asks again; what cannot be read is asked for again at once.
        """
        try:
            header, payload = unseal(frames)
        except Damaged as error:
            self.malformed, self.last_fault = self.malformed + 1, str(error)
            return
        try:
            envelope = wire.unpack_request(header)
            peer = self.peers.hear(envelope, identity, now)
        except ValueError as error:
            self._refuse(identity, header, str(error))
            return
        seq, body = envelope.seq, envelope.body
        if isinstance(body, messages.Again):
            self._answer_again(peer, seq, now)
        elif seq in peer.replies:
            self._send(peer, peer.replies[seq])
        elif seq >= peer.acked and (peer.incarnation, seq) not in self.parked:
            self._execute(Waiting(peer, envelope, now), payload, now)

    def settle(self, now: float) -> None:
        """Try what is parked again, oldest first; drop what its sender no longer wants."""
        no_lease = not self.buffer.over and self.buffer.room() < 1
        for key, waiting in list(self.parked.items()):
            if waiting.seq < waiting.peer.acked or waiting.peer.replaced:
                del self.parked[key]
            elif no_lease and isinstance(waiting.body, messages.AskLease):
                continue
            elif (reply := self._try(waiting, _NOTHING, now)) is not None:
                del self.parked[key]
                self._reply(waiting.peer, waiting.seq, reply)

    def tick(self, now: float) -> None:
        """What time alone changes: silent generators lose their leases, old leases end. Raises NoGenerators."""
        self.started_at = now if self.started_at is None else self.started_at
        self.buffer.expire(now)
        for peer in list(self.peers.known.values()):
            silence = now - peer.last_heard
            if silence > self.supervise.dead_after_s and not peer.silent:
                peer.silent = True
                self.buffer.release(peer.incarnation)
            if silence > max(FORGET_AFTER_S, self.supervise.dead_after_s) and not self.peers.is_rank(peer):
                self._part(peer)
        self._check_generators(now)

    def status(self, now: float) -> dict[str, Any]:
        """Plain data for `asyncrl status`: the ledger, every process, who waits for what and why."""
        buffer = self.buffer
        leases = [s.granted_at for s in buffer.leased.values()]
        return {
            "run": self.run,
            "step": buffer.step,
            "version": buffer.live_version,
            "finished": buffer.finished,
            "exhausted": buffer.exhausted,
            "ledger": buffer.accounts(),
            "why_dropped": self.why_dropped,
            "dropped_reward": buffer.dropped_means.reward if buffer.dropped_means.num else None,
            "buffered": len(buffer.buffered),
            "buffered_bytes": buffer.bytes_buffered,
            "room": buffer.room(),
            "oldest_lease_s": now - min(leases) if leases else 0.0,
            "processes": [describe(p, self.peers, buffer, now) for p in self.peers.processes()],
            "waiting": [
                *ranks.waiting(self.peers, now, silent_s=self._silent_s),
                *({"who": w.peer.name, "for_s": now - w.since, "why": self._why(w, now)} for w in self.parked.values()),
                *({"who": p.name, "for_s": now - p.waits_since, "why": p.waits} for p in self.peers.waiting()),
            ],
            "malformed": self.malformed,
            "last_fault": self.last_fault,
        }

    # Requests

    def _execute(self, waiting: Waiting, payload: Payload, now: float) -> None:
        reply = self._try(waiting, payload, now)
        if reply is None:
            self.parked[waiting.peer.incarnation, waiting.seq] = waiting
        else:
            self._reply(waiting.peer, waiting.seq, reply)

    def _try(
        self, waiting: Waiting, payload: Payload, now: float
    ) -> messages.Reply | tuple[messages.Taken, list[Parcel]] | None:
        """The reply; None when it has to wait. The sender's mistakes are refused, broken invariants raise."""
        peer, body = waiting.peer, waiting.body
        if why := self.standing.refusal(peer, body, kept=self.kept):
            return messages.Refused(message=why, no_place=peer.replaced)
        try:
            return self._answer(waiting, body, payload, now)
        except ValueError as error:
            return messages.Refused(message=str(error))
        except RuntimeError as error:
            self._reply(peer, waiting.seq, messages.Refused(message=str(error), fatal=True))
            raise

    def _answer(
        self, waiting: Waiting, body: messages.Request, payload: Payload, now: float
    ) -> messages.Reply | tuple[messages.Taken, list[Parcel]] | None:
        peer, buffer = waiting.peer, self.buffer
        match body:
            case messages.Insert(lease_id=lease_id):
                try:
                    parcel = self.store.parcel(peer.incarnation, body, payload)
                except ValueError as error:
                    return messages.Resend(fault=str(error))
                accepted = self._may_end(peer, lease_id) and buffer.insert(lease_id, parcel)
                if accepted:
                    self.earned.add(length=parcel.length, reward=parcel.reward)
                unused = self.store.unused(peer.incarnation, body.full, buffer, self.peers) if body.full else []
                return messages.Done(accepted=accepted, unused=unused)
            case messages.AskLease(n=n):
                return self._grant(peer, waiting.seq, n, now)
            case messages.Drop():
                return messages.Done(accepted=self._may_end(peer, body.lease_id) and self._drop(body))
            case messages.Heartbeat(activity=activity, held=held, waits=waits):
                peer.pace.report(activity, now)
                peer.wait_for(waits, now)
                buffer.renew(peer.incarnation, set(held), acked=waiting.envelope.acked, now=now)
                return messages.Done(accepted=buffer.finished is None)
            case messages.Beat():
                self.peers.beat(peer, body, now)
                return ranks.missing(self.peers, now, silent_s=self._silent_s)
            case messages.Take():
                return self._take(waiting, body, now)
            case messages.Publish(version=version, step=step):
                buffer.publish(version=version, step=step)
            case messages.Hello():
                return self._welcome(waiting, body, now)
            case messages.Lookup(key=key):
                value = self.standing.valid(self.peers).get(key)
                return messages.Value(value=value) if value is not None else None
            case messages.Announce(key=key, value=value):
                self.standing.announce(key, value, peer)
            case messages.Finish(reason=reason):
                buffer.finish(reason)
            case messages.Status():
                return messages.Report(status=self.status(now))
            case messages.Rewind(step=step, version=version):
                self._rewind(step, version)
                self.standing.begin(peer, self.peers)
            case messages.Forget(step=step):
                self.forget(step, buffer)
            case messages.Leave():
                self._leave(peer)
        return messages.Done()

    def _welcome(self, waiting: Waiting, hello: messages.Hello, now: float) -> messages.Reply | None:
        """A place is given to one process: to the newcomer when the connection of the one that has it has ended, as it
        does when that is killed, or when that is silent. None until this is known, or that one has spoken again."""
        peer, owner = waiting.peer, self.peers.owner(waiting.peer)
        peer.claims = False
        if owner is not None and self.connected(owner.identity) and now - owner.last_heard <= self._silent_s:
            peer.claims = owner.last_heard <= waiting.since
            peer.replaced = not peer.claims
            why = why_taken(owner, now)
            return None if peer.claims else messages.Refused(message=why, no_place=True)
        for former in self.peers.introduce(peer, hello):
            self.buffer.release(former.incarnation)
        announced, offer = self.standing.valid(self.peers), self.store.offer
        return messages.Welcome(run=self.run, version=self.buffer.live_version, announced=announced, offer=offer)

    def _grant(self, peer: Peer, seq: int, n: int, now: float) -> messages.Leases | None:
        if peer.silent:  # its request is still parked: it must not get back the leases that its silence has freed
            return None
        owner = peer.incarnation
        share = self.buffer.share(owner, num_owners=max(1, self.peers.num_alive()))
        # A server that was killed before it could say so may have granted some for this very request.
        seats = [s for s in self.buffer.leased.values() if (s.owner, s.request) == (owner, seq)]
        seats = seats or self.buffer.lease(min(n, share), owner=owner, request=seq, now=now)
        if not seats and not self.buffer.over:
            return None
        self.granted = self.granted or bool(seats)
        return messages.Leases(
            leases=[messages.Lease(id=s.lease_id, prompt=s.prompt, version=s.version, attempt=s.attempt) for s in seats]
        )

    def _may_end(self, peer: Peer, lease_id: int) -> bool:
        """A lease is ended by its owner alone: somebody from before a rewind may hold another one of that number."""
        seat = self.buffer.leased.get(lease_id)
        return seat is None or seat.owner == peer.incarnation

    def _drop(self, body: messages.Drop) -> bool:
        if body.reason == "filtered" and body.lease_id in self.buffer.leased:
            self.earned.add(length=body.length, reward=body.reward)
        if body.why and (body.reason in self.why_dropped or len(self.why_dropped) < MAX_REASONS):
            self.why_dropped[body.reason] = body.why
        try:
            return self.buffer.drop(
                body.lease_id, body.reason, num_tokens=body.num_tokens, reward=body.reward, length=body.length
            )
        except EndlessRejection as error:
            last = "".join(f"; the last {reason}: {why}" for reason, why in self.why_dropped.items())
            raise EndlessRejection(f"{error}{last}") from None

    def _take(self, waiting: Waiting, body: messages.Take, now: float) -> tuple[messages.Taken, list[Parcel]] | None:
        parcels = self.buffer.take(step=body.step, num_groups=body.num_groups, version=body.version)
        if parcels is None:
            return None
        metrics = self._metrics(now - waiting.since)
        places = [p.place for p in parcels] if body.by_place and any(p.place for p in parcels) else []
        return messages.Taken(num_groups=len(parcels), version=body.version, metrics=metrics, places=places), parcels

    def _rewind(self, step: int, version: int) -> None:
        """Another trainer starts: leases of the former run are void, and no lease gets the number of one of them: its
        generator may live on and end it."""
        next_lease, self.buffer = self.buffer.next_lease, self.rewind(step)
        self.buffer.next_lease = max(self.buffer.next_lease, next_lease)
        self.buffer.least_version = version

    def _leave(self, peer: Peer) -> None:
        self.buffer.release(peer.incarnation)
        peer.replaced = peer.left = True

    # Replies

    def _reply(self, peer: Peer, seq: int, reply: messages.Reply | tuple[messages.Taken, list[Parcel]]) -> None:
        body, parcels = reply if isinstance(reply, tuple) else (reply, [])
        by_place = isinstance(body, messages.Taken) and body.places
        sent = [p for p in parcels if p.place is None] if by_place else parcels
        try:
            payload = [frame for parcel in sent for frame in self.store.frames(parcel)]
        except RuntimeError as error:
            self._reply(peer, seq, messages.Refused(message=str(error), fatal=True))
            raise
        digests = [digest for parcel in sent for digest in parcel.digests]
        frames = wire.pack_message(wire.ReplyEnvelope(self.incarnation, seq, body), payload, digests)
        if not isinstance(body, messages.Resend):
            peer.remember(seq, frames, parcels)
        self._send(peer, frames)

    def _refuse(self, identity: bytes, header: wire.Frame, fault: str) -> None:
        """What cannot be read: ask the sender for it again, if that much can be read, so that it does not wait."""
        self.malformed, self.last_fault = self.malformed + 1, fault
        try:
            seq = wire.unpack_sender(header).seq
        except ValueError:
            return
        again = wire.ReplyEnvelope(self.incarnation, seq, messages.Resend(fault=fault))
        self.outbox.append((identity, wire.pack_message(again)))

    def _answer_again(self, peer: Peer, seq: int, now: float) -> None:
        if seq in peer.replies:
            self._send(peer, peer.replies[seq])
            return
        waiting = self.parked.get((peer.incarnation, seq))
        body = messages.Parked(diagnosis=self._why(waiting, now)) if waiting else messages.Resend()
        self._send(peer, wire.pack_message(wire.ReplyEnvelope(self.incarnation, seq, body)))

    def _send(self, peer: Peer, frames: list[wire.Frame]) -> None:
        self.outbox.append((peer.identity, frames))

    # Views

    def _metrics(self, waited_s: float) -> dict[str, float]:
        buffer, generators = self.buffer, self.peers.alive()
        references = self.peers.in_service("reference")
        for peer in [*generators, *references]:
            peer.pace.look()
        idle = [1.0 - p.pace.busy for p in generators]
        metrics: dict[str, float] = {
            "replay/buffered": len(buffer.buffered),
            "replay/bytes": buffer.bytes_buffered,
            "replay/wait_s": waited_s,
            "idle/generator": sum(idle) / len(idle) if idle else 1.0,
            "throughput/generated_tokens_per_s": sum(p.pace.tokens_per_s for p in generators),
        }
        if references:
            metrics["idle/reference"] = 1.0 - sum(p.pace.busy for p in references) / len(references)
        if self.earned.num:
            metrics["reward/mean"] = self.earned.reward
            self.earned = Means()
        if buffer.trained_means.num:
            metrics["bias/trained_length"] = buffer.trained_means.length
        if buffer.dropped_means.num:
            metrics["bias/dropped_length"] = buffer.dropped_means.length
            metrics["bias/dropped_reward"] = buffer.dropped_means.reward
        return metrics | buffer.accounts() | (buffer.curriculum.metrics() if buffer.curriculum is not None else {})

    def _why(self, waiting: Waiting, now: float) -> str:
        name, waited = waiting.peer.name, now - waiting.since
        return diagnosis.why(self.buffer, self.peers, waiting.body, name=name, waited_s=waited, now=now)

    @property
    def _silent_s(self) -> float:
        """A trainer rank not heard from for this long is named."""
        return max(diagnosis.SILENT_S, 3 * self.supervise.heartbeat_s)

    # Time

    def _check_generators(self, now: float) -> None:
        takes = [w for w in self.parked.values() if isinstance(w.body, messages.Take)]
        if self.peers.num_alive() or not takes or self.buffer.ended:
            self.without_generators_since = None
            return
        if self.without_generators_since is None:
            self.without_generators_since = now
        waited = now - self.without_generators_since
        # Before the first lease they may be loading models, too busy to be heard; in a resumed run as well.
        allowed = self.supervise.grace_s + (0 if self.granted else self.supervise.start_timeout_s)
        if waited > allowed:
            why = f"no generator has been alive for {waited:.0f} s: {self._why(takes[0], now)}"
            self._reply(takes[0].peer, takes[0].seq, messages.Refused(message=why, fatal=True))
            raise NoGenerators(why)

    def _part(self, peer: Peer) -> None:
        self.buffer.release(peer.incarnation)
        self.peers.remove(peer)
        for key in [k for k in self.parked if k[0] == peer.incarnation]:
            del self.parked[key]
