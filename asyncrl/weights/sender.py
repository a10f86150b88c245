"""The sending end of a weight sync: `publish(version)` on every trainer rank.

Called by the trainer's loop after a step, and for generators that (re)joined. Every rank walks the same buckets and
takes part in every gather; rank 0 alone talks to receivers, and whatever happens to one of them, the ranks stay in
step. It never gathers before all ranks have agreed on the plan.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from asyncrl.config import WeightsConfig
from asyncrl.hosts import reachable
from asyncrl.replay.keys import CurveKeys
from asyncrl.weights import ipc
from asyncrl.weights.checksums import checksum
from asyncrl.weights.control import Control
from asyncrl.weights.gather import Gatherer, Tensors, agree, compare_plans, describe
from asyncrl.weights.messages import PlanSpec, SyncReport
from asyncrl.weights.plan import ALIGNMENT, Bucket, buckets, make_plan, total_bytes
from asyncrl.weights.store import WireBroken, serve_store
from asyncrl.weights.sync import Conductor, Group, Sync
from asyncrl.weights.wire import current, exact, make_buffer, resolve_backend

log = logging.getLogger(__name__)

SENDING = 2
"""Buckets that the sender holds: one is filled while the other is on the wire."""


class WeightSender:
    """Constructed on every trainer rank; all methods are called from one thread."""

    def __init__(
        self,
        *,
        tensors: Tensors,
        rank: int,
        config: WeightsConfig,
        device: torch.device | str,
        curve: CurveKeys | None = None,
    ) -> None:
        """`tensors()` yields (Hugging Face name, local tensor or DTensor) in a fixed order, the same on all ranks, in
        the dtype that receivers shall get; it may make each tensor as it is asked for. Raises ValueError on a bind
        address that needs keys."""
        self._tensors, self._config, self._device = tensors, config, exact(device)
        self._plan: PlanSpec | None = None
        self._cut: list[Bucket] = []
        self._buffers: list[Tensor] = []
        self._buffers_of: Group | None = None
        self._buffers_shared = False
        self._conductor = self._conduct(curve) if rank == 0 else None
        self._live: int | None = None  # the version published last

    @property
    def address(self) -> str | None:
        """Of the control socket, for generators; None on other ranks than 0."""
        return self._advertised if self._conductor is not None else None

    def newcomers(self) -> int:
        """Receivers that said hello and do not have the version published last (before the first: all). Rank 0 only."""
        if self._conductor is None:
            raise RuntimeError("newcomers() is known to trainer rank 0 alone")
        self._conductor.pump()
        return len(self._conductor.members.behind(self._live))

    def publish(self, version: int) -> SyncReport:
        """Bring every receiver that is behind to `version`; returns when it is live on them, or they are dropped.

        Collective over trainer ranks. Consumes `tensors()`; waits for receivers, stage by stage, each bounded by
        config.timeout_s; is unblocked by their answers or their deaths; produces a report (complete on rank 0). With no
        receiver it returns at once. Raises RuntimeError on every rank when the ranks' plans differ.
        """
        began = time.perf_counter()
        plan = self._plan or self._make_plan()
        self._live = version
        sync = Sync(self._conductor, plan, version) if self._conductor is not None else None
        gather_s = 0.0
        with current(self._device):
            while agree(sync.prepare() if sync else 0, self._device):
                gather_s += self._broadcast(plan, sync)
                if sync is not None:
                    sync.settle()
            served = agree(sync.tally.served if sync else 0, self._device)
        return self._report(version, served, sync, gather_s, time.perf_counter() - began)

    def close(self) -> None:
        """Leave the group and free the control socket. Safe to call twice."""
        if self._conductor is not None:
            self._conductor.close()
        self._conductor = self._buffers_of = None
        self._buffers = []

    def _broadcast(self, plan: PlanSpec, sync: Sync | None) -> float:
        """Gather every bucket on all ranks and, on rank 0, broadcast it; returns the seconds spent in gathering.

        Bucket k+1 is gathered while k is on the wire. A broken wire stops the sending, not the gathering, so that the
        ranks stay in step.
        """
        gatherer, spent = Gatherer(self._tensors, plan), 0.0
        buffers = self._allocate() if sync is not None else []
        for index, bucket in enumerate(self._cut):
            buffer = None
            if sync is not None:
                sync.free_buffer(len(buffers))
                buffer = buffers[index % len(buffers)][: bucket.nbytes]
            began = time.perf_counter()
            gatherer.fill(bucket, buffer)
            spent += time.perf_counter() - began
            if sync is not None and buffer is not None:
                if index == 0:
                    sync.open()
                sync.send(buffer, checksum if plan.checksum else None)
        return spent

    def _make_plan(self) -> PlanSpec:
        plan = make_plan(
            describe(self._tensors),
            self._config.bucket_bytes,
            self._config.num_buffers,
            checksum=self._config.checksum,
        )
        compare_plans(plan, self._device)
        self._plan, self._cut = plan, buckets(plan)
        return plan

    def _allocate(self) -> list[Tensor]:
        """Buffers of the present group's own: a broken one may still be sending from its. With ipc nobody sends, and
        what receivers that were killed have mapped is not freed: the same for all groups."""
        assert self._conductor is not None
        group = self._conductor.group
        assert group is not None
        shared = group.spec.backend == "ipc"
        if not self._buffers or (self._buffers_of is not group and not (shared and self._buffers_shared)):
            self._buffers = []
            size = max(bucket.nbytes for bucket in self._cut)
            count = min(SENDING, len(self._cut))
            self._buffers = [make_buffer(group.spec, size, self._device, sends=True) for _ in range(count)]
        self._buffers_of, self._buffers_shared = group, shared
        return self._buffers

    def _conduct(self, curve: CurveKeys | None) -> Conductor:
        config = self._config
        control = Control(config.bind, timeout_s=config.timeout_s, curve=curve)
        self._advertised = reachable(control.address)
        host = self._advertised.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
        return Conductor(
            control=control,
            store=serve_store(host, config.timeout_s),
            backend=self._backend(),
            timeout_s=config.timeout_s,
            device=self._device,
        )

    def _backend(self) -> str:
        """What was chosen, and gloo where that is ipc and this system has no memory to share."""
        backend = resolve_backend(self._config.backend, self._device)
        if backend == "ipc":
            try:
                ipc.shareable(ALIGNMENT, self._device)
            except WireBroken as error:
                log.warning("weights go through host memory (gloo): %s", error)
                return "gloo"
        return backend

    def _report(self, version: int, served: int, sync: Sync | None, gather_s: float, total_s: float) -> SyncReport:
        assert self._plan is not None
        size = total_bytes(self._plan) if served else 0
        if sync is None:
            return SyncReport(version=version, receivers=served, bytes=size, gather_s=gather_s, total_s=total_s)
        t = sync.tally
        return SyncReport(
            version=version, receivers=served, dropped=tuple(t.dropped), bytes=size, gather_s=gather_s, total_s=total_s,
            prepare_s=t.prepare_s, join_s=t.join_s, wire_s=t.wire_s, load_s=t.load_s, commit_s=t.commit_s,
            pause_s=t.pause_s,
        )  # fmt: skip
