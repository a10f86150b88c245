"""From the trainer's shards to whole tensors on rank 0: one collective for all tensors of a bucket.

Called by the gatherer on every trainer rank. A `full_tensor()` per tensor costs more processor time than an H200 needs
to send it; here the rows that FSDP gave each rank go to rank 0 in one message a bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

ALIGNMENT = 16

Item = tuple[DTensor, Tensor | None]


def collect(tensors: Sequence[Tensor], targets: Sequence[Tensor | None]) -> None:
    """Put the bytes of each whole tensor into its target, uint8 of as many bytes (None on ranks that want nothing).

    Collective over the ranks that share the tensors, in the same order on all of them; the first rank of a mesh is the
    one with targets. On a GPU copies are queued on the current stream; those into host memory are done on return.
    """
    copies = _Copies()
    by_mesh: dict[DeviceMesh, list[Item]] = defaultdict(list)
    for tensor, target in zip(tensors, targets, strict=True):
        if isinstance(tensor, DTensor) and _in_rows(tensor):
            by_mesh[tensor.device_mesh].append((tensor, target))
        else:
            copies.add(target, as_bytes(_whole(tensor)))
    for mesh, items in by_mesh.items():
        _gather_rows(mesh, items, copies)
    copies.make()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Copies:
    """Copies to make at once: one call for many tensors, where a call for each would cost more than the bytes."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, target: Tensor | None, source: Tensor) -> None:
        if target is not None and source.numel():
            self._targets.append(target)
            self._sources.append(source)

    def make(self) -> None:
        if self._targets:
            here = self._targets[0].device == self._sources[0].device
            torch._foreach_copy_(self._targets, self._sources, non_blocking=here)
        self._targets, self._sources = [], []


def _in_rows(tensor: DTensor) -> bool:
    """Whether each rank of one dimension holds some rows, as FSDP deals them."""
    return tensor.placements == (Shard(0),) and tensor.device_mesh.size() > 1


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1 or all(isinstance(p, Replicate) for p in tensor.placements):
        return tensor.to_local()
    return tensor.full_tensor()


def _gather_rows(mesh: DeviceMesh, items: Sequence[Item], copies: _Copies) -> None:
    """Every rank sends the first rank of the mesh its rows of all `items`, in one message of the same size for all."""
    size, first = mesh.size(), mesh.get_local_rank() == 0
    shares = [_share(tensor, size) for tensor, _ in items]
    offsets = [0]
    for share in shares:
        offsets.append(offsets[-1] + -(-share // ALIGNMENT) * ALIGNMENT)
    if not offsets[-1]:
        return
    mine = torch.empty(offsets[-1], dtype=torch.uint8, device=items[0][0].to_local().device)
    packing = _Copies()
    for (tensor, _), offset in zip(items, offsets, strict=False):
        local = as_bytes(tensor.to_local())
        packing.add(mine[offset : offset + local.numel()], local)
    packing.make()
    parts = [torch.empty_like(mine) for _ in range(size)] if first else None
    dist.gather(mine, parts, group=mesh.get_group(), group_dst=0)
    for rank, part in enumerate(parts or ()):
        for (_, target), share, offset in zip(items, shares, offsets, strict=False):
            if target is not None:
                place = target[rank * share : (rank + 1) * share]
                copies.add(place, part[offset : offset + place.numel()])


def _share(tensor: DTensor, size: int) -> int:
    """Bytes of the most rows that one of `size` ranks holds; the last ranks may hold fewer, or none."""
    rows, *others = tensor.shape
    return -(-rows // size) * math.prod(others) * tensor.element_size()
