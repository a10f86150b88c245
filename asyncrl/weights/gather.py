"""Collecting the trainer's shards into buckets: what runs on every trainer rank during a publish.

Every rank walks the same tensors in the same order, so each gather is entered by all ranks; only rank 0 has a buffer to
put the result in. Never waits for a receiver.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.weights.messages import PlanSpec, TensorSpec
from asyncrl.weights.plan import Bucket, Piece, first_difference, tensor_bytes
from asyncrl.weights.shards import collect

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]


LARGE = 1 / 32
"""Of all bytes: a tensor that must not be among the first or the last to be sent."""


def in_sending_order(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Embeddings and the like in the middle, everything else in its order: nothing is on the wire while a sender fills
    the first bucket, nor while receivers load the last, so these are cut small (see `plan.buckets`)."""
    items = list(named)
    limit = LARGE * sum(tensor.numel() * tensor.element_size() for _, tensor in items)
    large = [item for item in items if item[1].numel() * item[1].element_size() > limit]
    small = [item for item in items if item[1].numel() * item[1].element_size() <= limit]
    half = len(small) // 2
    return [*small[:half], *large, *small[half:]]


def describe(tensors: Tensors) -> list[TensorSpec]:
    """The specs of what `tensors()` yields, in its order; tied tensors become aliases of the first of them."""
    specs: list[TensorSpec] = []
    for name, tensor, first in _walk(tensors):
        if first is None:
            specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        else:
            spec = specs[first]
            specs[first] = TensorSpec(spec.name, spec.dtype, spec.shape, (*spec.aliases, name))
    return specs


class Gatherer:
    """Fills the buckets of one publish, in order. Collective: every trainer rank makes the same calls."""

    def __init__(self, tensors: Tensors, plan: PlanSpec) -> None:
        self._plan = plan
        self._walk = ((name, tensor) for name, tensor, first in _walk(tensors) if first is None)
        self._spanning: Tensor | None = None  # the bytes of a tensor that goes on in the next bucket

    @torch.no_grad()
    def fill(self, bucket: Bucket, buffer: Tensor | None) -> None:
        """Gather what `bucket` holds and, where there is a buffer, put it there (queued on the current stream).

        A tensor that spans buckets is gathered once and kept until its last piece. Raises RuntimeError when `tensors()`
        does not yield what the plan says.
        """
        new = [piece for piece in bucket.pieces if piece.start == 0]
        tensors = [self._next(piece.tensor) for piece in new]
        before, self._spanning = self._spanning, None
        collect(tensors, [self._target(t, p, buffer) for t, p in zip(tensors, new, strict=True)])
        if buffer is None:
            return
        for piece in bucket.pieces:
            source = before if piece.start else self._spanning if piece.nbytes < self._size(piece) else None
            if source is not None:
                here = source.device == buffer.device
                part = source[piece.start : piece.start + piece.nbytes]
                buffer[piece.offset : piece.offset + piece.nbytes].copy_(part, non_blocking=here)
                if piece.start + piece.nbytes < self._size(piece):
                    self._spanning = source

    def _target(self, tensor: Tensor, piece: Piece, buffer: Tensor | None) -> Tensor | None:
        """Where a tensor that begins in this bucket goes: into the buffer, or beside it when it is too large."""
        if buffer is None:
            return None
        if piece.nbytes == self._size(piece):
            return buffer[piece.offset : piece.offset + piece.nbytes]
        self._spanning = torch.empty(self._size(piece), dtype=torch.uint8, device=tensor.device)
        return self._spanning

    def _size(self, piece: Piece) -> int:
        return tensor_bytes(self._plan.tensors[piece.tensor])

    def _next(self, index: int) -> Tensor:
        spec = self._plan.tensors[index]
        name, tensor = next(self._walk, (None, None))
        if tensor is None or (name, tuple(tensor.shape)) != (spec.name, spec.shape):
            got = "nothing" if tensor is None else f"{name} {list(tensor.shape)}"
            raise RuntimeError(f"tensor {index} of the plan is {spec.name} {list(spec.shape)}; tensors() yielded {got}")
        if str(tensor.dtype) != f"torch.{spec.dtype}":
            raise RuntimeError(f"{name} is {tensor.dtype}; the plan says {spec.dtype}")
        return tensor


def agree(value: int, device: torch.device) -> int:
    """Trainer rank 0's `value`, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    cell = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(cell, src=0)
    return int(cell.item())


def compare_plans(plan: PlanSpec, device: torch.device) -> None:
    """Raise RuntimeError on every trainer rank unless all of them made the same plan."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    odd = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if not odd:
        return
    theirs = msgspec.msgpack.decode(_share(msgspec.msgpack.encode(plan), device), type=PlanSpec)
    where = f": {first_difference(plan, theirs)}" if plan.digest != theirs.digest else ""
    raise RuntimeError(f"trainer ranks {odd} would send other weights than rank 0{where}")


def _share(data: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes, on every rank."""
    size = agree(len(data), device)
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        mine.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(mine, src=0)
    return bytes(mine.tolist())


def _walk(tensors: Tensors) -> Iterator[tuple[str, Tensor, int | None]]:
    """Each (name, tensor, index of the tensor it is tied to or None).

    Tied means: the same memory as an earlier tensor that is still alive. A tensor that was made for the occasion (a
    cast) and is gone cannot be tied, even if its memory was used again.
    """
    alive: dict[tuple[object, ...], tuple[weakref.ref[Tensor], int]] = {}
    count = 0
    for name, tensor in tensors():
        key = _memory(tensor)
        reference, index = alive.get(key, (None, -1)) if key else (None, -1)
        if reference is not None and reference() is not None:
            yield name, tensor, index
            continue
        if key:
            alive[key] = (weakref.ref(tensor), count)
        yield name, tensor, None
        count += 1


def _memory(tensor: Tensor) -> tuple[object, ...] | None:
    """What two names of one tensor have in common, on every rank alike: a rank's shard may be empty and have no
    address, so it is the storage that counts."""
    if tensor.numel() == 0:
        return None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), tuple(tensor.shape), local.stride(), tensor.dtype)
