"""The plan of a weight sync: every tensor in order, cut into buckets of a fixed size.

Called by the sender, by every receiver and by the follower, which must all arrive at the same cut from the same plan.
Pure: specs in, buckets out. Never touches a tensor, a device or a socket.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.weights.messages import PlanSpec, TensorSpec

ALIGNMENT = 16
"""Every tensor starts at a multiple of this within its bucket, so that a bucket can be viewed as any dtype."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


TIMED = 3
"""Buckets' worth of bytes from which on the ends of a plan are cut smaller: less than that has no middle."""
FIRST, BEFORE_LAST, LAST = 1 / 8, 3 / 8, 1 / 8
"""Of a bucket. Nothing is on the wire while the sender fills the first bucket, nor while a receiver loads and sums what
is left when the last has come: a GPU loads a bucket in the time in which .38 of one arrives."""

REMEMBERED = 8
_cuts: dict[str, list[Bucket]] = {}
"""Cutting a large plan takes longer than a message, and stands between a receiver and its first bucket."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes of tensor number `tensor`, from its byte `start`, at byte `offset` of the bucket."""

    tensor: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast: `nbytes` bytes, a multiple of ALIGNMENT and at least that; gaps between pieces carry nothing."""

    pieces: tuple[Piece, ...]
    nbytes: int


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor. Raises ValueError for a dtype that cannot travel."""
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"{spec.name} has dtype {spec.dtype}; a sync carries {', '.join(DTYPE_BYTES)}")
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def total_bytes(plan: PlanSpec) -> int:
    """Bytes of all tensors, without alignment."""
    return sum(tensor_bytes(spec) for spec in plan.tensors)


def digest(plan: PlanSpec) -> str:
    """SHA-256 (hex) over everything in the plan but its own `digest`, and over the buckets that are cut from it here: a
    peer whose asyncrl cuts otherwise is refused, where the group would hang or carry the wrong bytes."""
    body = (plan.tensors, plan.bucket_bytes, plan.num_buffers, plan.checksum, _cut(plan))
    return hashlib.sha256(msgspec.msgpack.encode(body)).hexdigest()


def make_plan(specs: Sequence[TensorSpec], bucket_bytes: int, num_buffers: int, *, checksum: bool = True) -> PlanSpec:
    """Check and seal a plan. Raises ValueError on a name used twice, a foreign dtype, or sizes that cannot work."""
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise ValueError(f"weights.bucket_bytes is {bucket_bytes}; it must be a positive multiple of {ALIGNMENT}")
    if num_buffers < 1:
        raise ValueError(f"weights.num_buffers is {num_buffers}; it must be at least 1 (2 to overlap)")
    if not specs:
        raise ValueError("there are no tensors to send: `tensors()` yielded nothing")
    _refuse_duplicates(specs)
    for spec in specs:
        tensor_bytes(spec)
    plan = PlanSpec(
        tensors=tuple(specs), bucket_bytes=bucket_bytes, num_buffers=num_buffers, checksum=checksum, digest=""
    )
    return msgspec.structs.replace(plan, digest=digest(plan))


def buckets(plan: PlanSpec) -> list[Bucket]:
    """Cut the plan: pieces cover every byte of every tensor once, in order. Remembered by the plan's digest.

    A tensor that fits in a bucket is never split, so that a receiver can load it in place; one that is larger fills
    what is left of the current bucket and goes on in the next. An empty tensor is one piece of no bytes. The first
    bucket and the last two are smaller where whole tensors allow it (`in_sending_order` puts the large ones elsewhere).
    """
    if plan.digest not in _cuts:
        if len(_cuts) >= REMEMBERED:
            _cuts.clear()
        _cuts[plan.digest] = _cut(plan)
    return _cuts[plan.digest]


def _cut(plan: PlanSpec) -> list[Bucket]:
    cut: list[Bucket] = []
    pieces: list[Piece] = []
    fill, breaks = 0, _breaks(plan)

    def close() -> None:
        nonlocal pieces, fill
        cut.append(Bucket(tuple(pieces), max(_align(fill), ALIGNMENT)))
        pieces, fill = [], 0

    for index, spec in enumerate(plan.tensors):
        size, start = tensor_bytes(spec), 0
        if pieces and (index in breaks or _align(fill) + size > plan.bucket_bytes >= size):
            close()
        while True:
            offset = _align(fill)
            part = min(size - start, plan.bucket_bytes - offset)
            if part or not size:
                pieces.append(Piece(index, start, offset, part))
                start, fill = start + part, offset + part
            if start == size:
                break
            close()
    close()
    return cut


def _breaks(plan: PlanSpec) -> set[int]:
    """Tensors with which a bucket begins, whatever room is left in the one before."""
    sizes = [_align(tensor_bytes(spec)) for spec in plan.tensors]
    if sum(sizes) < TIMED * plan.bucket_bytes:
        return set()
    first = _fitting(sizes, FIRST * plan.bucket_bytes)
    last = len(sizes) - _fitting(sizes[::-1], LAST * plan.bucket_bytes)
    before_last = last - _fitting(sizes[:last][::-1], BEFORE_LAST * plan.bucket_bytes)
    return {first, before_last, last}


def _fitting(sizes: Sequence[int], limit: float) -> int:
    """How many of the first sizes are within the limit together."""
    return bisect.bisect_right(list(itertools.accumulate(sizes)), limit)


def first_difference(ours: PlanSpec, theirs: PlanSpec) -> str:
    """One line that names where two plans part, for the error of a rank that disagrees."""
    for position, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if a != b:
            return f"tensor {position} is {_show(a)} here and {_show(b)} there"
    if len(ours.tensors) != len(theirs.tensors):
        return f"{len(ours.tensors)} tensors here and {len(theirs.tensors)} there"
    return "the same tensors, but other bucket sizes, buffers or checksums"


def _refuse_duplicates(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for name in (name for spec in specs for name in (spec.name, *spec.aliases)):
        if name in seen:
            raise ValueError(f"two tensors are called {name!r}; names must be unique")
        seen.add(name)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _show(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"
