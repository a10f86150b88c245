"""One publish, as trainer rank 0 conducts it with the receivers that are behind: prepare, go, broadcast, commit.

What was prepared for an earlier version need not be prepared again, and the commit leaves right behind the last bucket:
a receiver compares the checksums itself. So a publish to known receivers waits for them once.

Called by the sender, stage by stage. It talks to receivers through Control and the Wire and keeps the group from one
publish to the next while its members stay the same. Each stage is bounded by `timeout_s`; a receiver that fails one is
dropped with that stage's name and a reason, and the rest goes on, with a rebuilt group where the old one broke. It
never enters a collective of the trainer's ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.weights.control import Control
from asyncrl.weights.ipc import is_unavailable
from asyncrl.weights.members import Gone, Member, Members
from asyncrl.weights.messages import (
    Commit,
    Committed,
    Discard,
    Dropped,
    Failed,
    Go,
    JoinSpec,
    PlanSpec,
    Prepare,
    Ready,
)
from asyncrl.weights.plan import buckets
from asyncrl.weights.store import WireBroken, announce, give_up
from asyncrl.weights.wire import Wire, open_wire

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", Ready, Committed)

FRESH_S = 3.0
"""Who was not heard of for this long (a hello comes each second) is asked whether it is ready, before others pause."""


@dataclass(slots=True)
class Group:
    """The weight group of the moment: who is in it, and the open wire once it is built."""

    keys: tuple[str, ...]
    spec: JoinSpec
    wire: Wire | None = None
    broadcasts: int = 0
    """Begun so far."""


@dataclass(slots=True)
class Tally:
    """What one publish did so far."""

    served: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    prepare_s: float = 0.0
    join_s: float = 0.0
    wire_s: float = 0.0
    commit_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0


class Conductor:
    """Keeps the members and the group; one `Sync` at a time works through it. Rank 0 only, one thread."""

    def __init__(self, *, control: Control, store: dist.TCPStore, backend: str, timeout_s: float,
                 device: torch.device) -> None:  # fmt: skip
        self.control, self.store, self.backend = control, store, backend
        self.timeout_s, self.device = timeout_s, device
        self.members = Members(time.time_ns())
        self.group: Group | None = None
        self._generation = 0

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Take in events; wait up to `timeout_s` for the first. False when there was none."""
        event = self.control.next(timeout_s)
        if event is None:
            return False
        while event is not None:
            self.members.apply(*event)
            event = self.control.next(0.0)
        return True

    def enlist(self, targets: list[Member]) -> Group:
        """The group of exactly these members: the present one if it is theirs and intact, else a new generation."""
        keys = tuple(m.key for m in targets)
        if self.group is None or self.group.keys != keys:
            self.disband("its members changed")
            self._generation += 1
            size = 1 + sum(m.num_ranks for m in targets)
            self.group = Group(keys, JoinSpec(
                host=self.store.host, port=self.store.port, generation=self._generation, first_rank=0, world_size=size,
                backend=self.backend, timeout_s=self.timeout_s,
            ))  # fmt: skip
        return self.group

    def disband(self, reason: str) -> None:
        """Close the group, if there is one, and release whoever waits in it."""
        if self.group is None:
            return
        give_up(self.store, self.group.spec.generation, reason)
        if self.group.wire is not None:
            self.group.wire.close()
        self.group = None

    def close(self) -> None:
        self.disband("the trainer closed the weight sender")
        self.control.close()


class Sync:
    """The publish of one version. Stages in order: prepare -> (open -> send* -> settle) -> prepare -> ... until prepare
    finds nobody left to serve."""

    def __init__(self, conductor: Conductor, plan: PlanSpec, version: int) -> None:
        self._c, self._plan, self._version = conductor, plan, version
        self.tally = Tally()
        conductor.pump()
        self._eligible = {m.key for m in conductor.members.behind(version)}
        self._targets: list[Member] = []
        self._sums: list[Tensor] = []
        self._started = 0  # buckets
        self._broken: str | None = None
        self._failed_first: set[str] = set()
        self._fruitless = 0
        self._wire_began = 0.0

    # -- prepare ---------------------------------------------------------------------------------------------------

    def prepare(self) -> int:
        """Agree on the plan with every receiver that is behind; those that do not answer are dropped.

        Returns how many will receive; nobody has joined or paused anything yet.
        """
        began = time.perf_counter()
        while True:
            self._targets = [m for m in self._c.members.behind(self._version) if m.key in self._eligible]
            if not self._targets or self._all_ready():
                break
        self.tally.prepare_s += time.perf_counter() - began
        return len(self._targets)

    def _all_ready(self) -> bool:
        group, digest, rank = self._c.enlist(self._targets), self._plan.digest, 1
        stale = time.monotonic() - FRESH_S
        if group.wire is not None and all(m.agreed == digest and m.heard > stale for m in self._targets):
            return True
        attempt = self._c.members.begin_attempt()
        for member in self._targets:
            own, plan = _with_first_rank(group.spec, rank), None if member.agreed == digest else self._plan
            order = Prepare(version=self._version, attempt=attempt, spec=own, digest=digest, plan=plan)
            self._c.control.send(member.key, order)
            rank += member.num_ranks
        self._collect()
        ready = [member for member in self._targets if self._expect(member, Ready, "prepare")]
        for member in ready:
            member.agreed = digest
        return len(ready) == len(self._targets)

    # -- broadcast -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Send everybody off, and build the group if it is new. Receivers pause from here on.

        Whoever has a head start hears it from the store."""
        self._broken, self._sums, self._started = None, [], 0
        attempt, group = self._c.members.begin_attempt(), self._c.group
        assert group is not None
        go = Go(version=self._version, attempt=attempt, generation=group.spec.generation, digest=self._plan.digest)
        for member in self._targets:
            self._c.control.send(member.key, go)
        announce(self._c.store, group.spec, group.broadcasts, self._plan.digest)
        group.broadcasts += 1
        began = time.perf_counter()
        if group.wire is None:
            self._guard(lambda: setattr(group, "wire", self._open_wire(group.spec)))
        self._wire_began = time.perf_counter()
        self.tally.join_s += self._wire_began - began

    def _open_wire(self, spec: JoinSpec) -> Wire:
        return open_wire(self._c.store, spec, 0, self._c.device, self._watch)

    def free_buffer(self, num_buffers: int) -> None:
        """What follows comes after the broadcast of the oldest of `num_buffers` buffers, if all are in use."""
        wire = self._wire
        if wire is not None and wire.in_flight >= num_buffers:
            self._guard(partial(wire.order, self._watch))

    def send(self, buffer: Tensor, checksum: Callable[[Tensor], Tensor] | None) -> None:
        """Start to broadcast one bucket, and take its checksum meanwhile. Does nothing when the wire is broken."""
        wire = self._wire
        if wire is None:
            return
        self._guard(partial(wire.start, buffer))
        self._started += 1
        if checksum is not None:
            self._sums.append(checksum(buffer))

    @property
    def _wire(self) -> Wire | None:
        group = self._c.group
        return group.wire if group is not None and self._broken is None else None

    def _guard(self, step: Callable[[], object]) -> None:
        """Run a step on the wire; if it breaks, release the others, who then report instead of waiting."""
        try:
            step()
        except WireBroken as error:
            self._broken = str(error)
            self._failed_first = {key for key, reply in self._c.members.replies.items() if isinstance(reply, Failed)}
            self._c.disband(self._broken)
            log.warning("version %d: %s", self._version, error)

    def _watch(self) -> None:
        self._c.pump()
        for member in self._targets:
            reply = self._c.members.replies.get(member.key)
            if isinstance(reply, Gone | Failed):
                raise WireBroken(f"generator {member.index}: {reply.reason}")

    # -- commit ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is still on the wire and tell every receiver to commit; drop those that failed, and leave those
        whose wire another one broke for the next attempt."""
        if self._wire is not None:
            self._guard(partial(self._wire.drain, self._watch))
        ours = torch.stack(self._sums).tolist() if self._sums else []
        sent = time.perf_counter()
        self.tally.wire_s += sent - self._wire_began
        if self._started == len(buckets(self._plan)):  # else nobody can have received all
            commit = Commit(version=self._version, attempt=self._c.members.attempt, checksums=ours)
            for member in self._targets:
                if member.key not in self._c.members.replies:
                    self._c.control.send(member.key, commit)
        self._collect()
        self._judge()
        self.tally.commit_s += time.perf_counter() - sent

    def _judge(self) -> None:
        dropped_before = len(self.tally.dropped)
        again = []
        for member in self._targets:
            reply = self._c.members.replies.get(member.key)
            if isinstance(reply, Failed) and reply.stage in ("join", "wire"):
                again.append((member, reply))
            elif committed := self._expect(member, Committed, "broadcast"):
                self._count(member, committed)
        if again:
            self._c.disband("a receiver has left it")  # even where the wire held: who fails does not stay
        reasons = [self._broken or "", *(reply.reason for _, reply in again)]
        cannot = next(filter(is_unavailable, reasons), None)
        if cannot is not None:
            log.warning("weights go through host memory (gloo) from now on: %s", cannot)
            self._c.backend = "gloo"
        elif again and len(self.tally.dropped) == dropped_before:
            self._second_chance(again)

    def _count(self, member: Member, reply: Committed) -> None:
        member.version = self._version
        self.tally.served += 1
        self.tally.pause_s = max(self.tally.pause_s, reply.pause_s)
        self.tally.load_s = max(self.tally.load_s, reply.load_s)

    def _second_chance(self, again: list[tuple[Member, Failed]]) -> None:
        """The wire broke and nobody is known to be dead: try once more, then drop those who failed first, so that
        attempts come to an end."""
        self._fruitless += 1
        if self._fruitless % 2:
            return
        suspects = [(m, reply) for m, reply in again if m.key in self._failed_first] or again
        for member, reply in suspects:
            self._drop(member, reply.stage, reply.reason)

    # -- replies ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait until each receiver has answered, is gone, or `timeout_s` is over."""
        deadline = time.monotonic() + self._c.timeout_s
        waiting = [m.key for m in self._targets]
        while any(key not in self._c.members.replies for key in waiting):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._c.pump(min(left, 1.0))

    def _expect(self, member: Member, kind: type[Answer], stage: str) -> Answer | None:
        """The member's answer if it is a `kind`; otherwise drop it, saying why."""
        reply = self._c.members.replies.get(member.key)
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, Failed):
            self._drop(member, reply.stage, reply.reason)
        elif isinstance(reply, Gone):
            self._drop(member, stage, reply.reason)
        elif reply is None:
            self._drop(member, stage, f"no answer within {self._c.timeout_s:g} s")
        else:
            self._drop(member, stage, f"answered {type(reply).__name__}")
        return None

    def _drop(self, member: Member, stage: str, reason: str) -> None:
        log.warning("version %d: generator %d dropped at %s: %s", self._version, member.index, stage, reason)
        self.tally.dropped.append(
            Dropped(index=member.index, incarnation=member.incarnation, stage=stage, reason=reason)
        )
        self._eligible.discard(member.key)
        if member.key in self._c.members.by_key:
            self._c.control.send(member.key, Discard(version=self._version, reason=f"{stage}: {reason}"))
        self._c.members.remove(member.key)
        self._c.disband(f"generator {member.index} was dropped")  # it may have left, and is not to be waited for


def _with_first_rank(spec: JoinSpec, rank: int) -> JoinSpec:
    return JoinSpec(
        host=spec.host, port=spec.port, generation=spec.generation, first_rank=rank, world_size=spec.world_size,
        backend=spec.backend, timeout_s=spec.timeout_s,
    )  # fmt: skip
