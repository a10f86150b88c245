"""The receiving end of the weight group, in the process that holds a model.

Called by the local engine and by vLLM's workers (through a worker extension), driven by the follower's control
messages. It hands complete tensors to `load` and answers with a checksum per bucket. It never decides whether the new
weights serve: that is commit's business.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from asyncrl.weights.checksums import checksum
from asyncrl.weights.head_start import HeadStart
from asyncrl.weights.messages import JoinSpec, PlanSpec
from asyncrl.weights.plan import Bucket, Piece, buckets, tensor_bytes
from asyncrl.weights.store import Watch, WireBroken, connect_store, watch_store
from asyncrl.weights.wire import Wire, current, exact, make_buffer, open_wire

log = logging.getLogger(__name__)

Load = Callable[[list[tuple[str, Tensor]]], None]


class Receiver:
    """One rank of the weight group. Methods are called one at a time, from one thread at a time."""

    def __init__(self) -> None:
        self._wire: Wire | None = None
        self._watch: Watch | None = None
        self._device = torch.device("cpu")
        self._buffers: list[Tensor] = []
        self._plan: PlanSpec | None = None
        """Of the last broadcast; the next one mostly has the same."""
        self._broadcasts, self._begun, self._claimed = 0, False, False
        """Of this group: how many are over; whether the next one's first buckets are started; whether by `receive`."""
        self._left_because = "receive() before join(): this process is in no weight group"
        self._lock = threading.Lock()
        self._head_start: HeadStart | None = None

    def join(self, spec: JoinSpec, rank_offset: int, device: torch.device | str, *, head_start: bool = False) -> None:
        """Enter the group as rank `spec.first_rank + rank_offset`, leaving any former one.

        `rank_offset` is 0 for an engine of one process, the tensor-parallel rank otherwise. `head_start`: buckets are
        received from the moment the sender begins, into as many buffers as there are, before `receive` is called.
        Raises WireBroken within about spec.timeout_s.
        """
        self.leave()
        store = connect_store(spec)
        self._device = exact(device)
        self._watch = watch_store(store, spec)
        with current(self._device):
            rank = spec.first_rank + rank_offset
            self._wire = open_wire(store, spec, rank, self._device, self._watch)
        self._broadcasts, self._begun, self._claimed = 0, False, False
        if head_start:
            begin, abandon = partial(self._begin_early, self._wire), partial(self._abandon, self._wire)
            self._head_start = HeadStart(spec, rank, store, begin=begin, claimed=self._has_claimed, abandon=abandon)

    def receive(self, plan: PlanSpec, load: Load) -> list[int]:
        """Take part in one broadcast of `plan`; bucket k is loaded while k+1 and its successors arrive.

        `load` gets complete tensors in plan order, on the model's device for nccl and in host memory for gloo, or where
        the sender has them for ipc. They are views of a buffer that is overwritten afterwards, and for ipc not this
        process's: copy from them before returning (on a GPU: queue the copy on the current stream), and never write to
        them. Returns a checksum per bucket, or nothing when the plan asks for none; when it returns,
        the copies are done. Raises WireBroken when the broadcast ends early, and whatever `load` raises; the group has
        then been left.
        """
        if self._wire is None:
            raise WireBroken(self._left_because)
        try:
            with current(self._device):
                return self._receive(plan, load)
        except BaseException:
            self.leave()  # what is left of the broadcast will not be taken: let the others know at once
            raise

    def _receive(self, plan: PlanSpec, load: Load) -> list[int]:
        cut = buckets(plan)
        assembler = _Assembler(plan)
        sums: list[Tensor] = []
        buffers = self._claim(plan, cut)
        assert self._wire is not None
        assert self._watch is not None
        for index, bucket in enumerate(cut):
            buffer = self._wire.order(self._watch)
            if tensors := assembler.take(bucket, buffer):
                load(tensors)
            if plan.checksum:  # after the load, so that a buffer overwritten too early shows as well
                sums.append(checksum(buffer))
            later = index + len(buffers)
            if later < len(cut):
                self._wire.start(buffers[later % len(buffers)][: cut[later].nbytes])
        self._wire.drain(self._watch)
        result = self._finish(sums)
        with self._lock:
            self._broadcasts, self._begun, self._claimed = self._broadcasts + 1, False, False
        return result

    def leave(self) -> None:
        """Leave the group, if in one, and free the buffers. Never blocks."""
        with self._lock:
            self._close("this process has left the weight group")

    def _close(self, reason: str) -> None:
        """Under the lock."""
        if self._head_start is not None:
            self._head_start.end()
        if self._wire is not None:
            self._wire.close()
            self._left_because = reason
        self._wire = self._watch = self._head_start = None
        self._buffers = []

    # -- the first buckets: by whoever comes first ---------------------------------------------------------------------

    def _claim(self, plan: PlanSpec, cut: list[Bucket]) -> list[Tensor]:
        """Start the first broadcasts, unless the head start has; returns the buffers that they fill."""
        with self._lock:
            if self._wire is None:
                raise WireBroken(self._left_because)
            if self._begun and self._plan is not None and self._plan.digest != plan.digest:
                raise WireBroken("the head start was of another plan")
            self._plan, self._claimed = plan, True
            allocated = self._allocate(plan, cut)
            if not self._begun:
                self._start_first(cut, allocated)
            return allocated

    def _begin_early(self, wire: Wire, number: int, digest: str) -> bool:
        """In the head start's thread: start the first broadcasts if they will be of the plan that is known."""
        with self._lock:
            plan = self._plan
            if self._wire is not wire or self._begun or self._claimed or number != self._broadcasts:
                return False
            if plan is None or plan.digest != digest or not self._buffers:
                return False
            with current(self._device), _own_stream(self._device):  # the model's stream has a step queued
                self._start_first(buckets(plan), self._buffers)
            return True

    def _start_first(self, cut: list[Bucket], into: list[Tensor]) -> None:
        assert self._wire is not None
        self._begun = True
        for bucket, buffer in zip(cut, into, strict=False):
            self._wire.start(buffer[: bucket.nbytes])

    def _has_claimed(self, number: int) -> bool:
        return self._claimed or self._broadcasts != number

    def _abandon(self, wire: Wire, reason: str) -> None:
        """In the head start's thread: nobody comes for what has begun, or the group is gone."""
        with self._lock:
            if self._wire is wire and not self._claimed:
                if self._begun:
                    log.warning("the head start of a weight sync is abandoned: %s", reason)
                self._close(reason)

    def _allocate(self, plan: PlanSpec, cut: list[Bucket]) -> list[Tensor]:
        """`plan.num_buffers` buffers of the largest bucket's size, kept from one sync to the next."""
        assert self._wire is not None
        size, count = max(bucket.nbytes for bucket in cut), min(plan.num_buffers, len(cut))
        if len(self._buffers) != count or self._buffers[0].numel() < size:
            self._buffers = []
            self._buffers = [make_buffer(self._wire.spec, size, self._device, sends=False) for _ in range(count)]
        return self._buffers

    def _finish(self, sums: list[Tensor]) -> list[int]:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return torch.stack(sums).tolist() if sums else []


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


class _Assembler:
    """Turns buckets into tensors: views where a tensor lies in one bucket, a buffer of its own where it is larger."""

    def __init__(self, plan: PlanSpec) -> None:
        self._plan = plan
        self._partial: Tensor | None = None

    def take(self, bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that this bucket completes, under each of their names."""
        complete: list[tuple[str, Tensor]] = []
        for piece in bucket.pieces:
            spec = self._plan.tensors[piece.tensor]
            data = self._gather(piece, buffer[piece.offset : piece.offset + piece.nbytes], tensor_bytes(spec))
            if data is not None:
                tensor = data.view(getattr(torch, spec.dtype)).view(spec.shape)
                complete += [(name, tensor) for name in (spec.name, *spec.aliases)]
        return complete

    def _gather(self, piece: Piece, data: Tensor, size: int) -> Tensor | None:
        if piece.nbytes == size:
            return data
        if piece.start == 0:
            self._partial = torch.empty(size, dtype=torch.uint8, device=data.device)
        assert self._partial is not None
        self._partial[piece.start : piece.start + piece.nbytes].copy_(data, non_blocking=True)
        if piece.start + piece.nbytes < size:
            return None
        whole, self._partial = self._partial, None
        return whole
