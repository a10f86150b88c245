"""The control messages of a weight sync, as the trainer's sender and a generator's follower exchange them.

    generator -> trainer   Hello(incarnation, num_ranks)             I am here; I serve `version` (-1: nothing yet)
    trainer -> generator   Prepare(spec, plan, version)              join this group; this is what will come
    generator -> trainer   Ready | Failed(stage, reason)
    trainer -> generator   Go(version)                               the broadcast starts now
    generator -> trainer   Received(version, checksums) | Failed
    trainer -> generator   Commit(version) | Discard(version)
    generator -> trainer   Committed(version, pause_s, wire_s, load_s)

Plain msgspec Structs over ZeroMQ (ROUTER on the trainer, DEALER on generators); the bytes of weights never pass here.
"""

from __future__ import annotations

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the plan, in Hugging Face naming."""

    name: str
    dtype: str
    """As torch prints it without the prefix: `bfloat16`, `float32`."""
    shape: tuple[int, ...]


class PlanSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Every tensor in order and the bucket size: from these alone, sender and receiver cut identical buckets."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    num_buffers: int
    digest: str
    """SHA-256 over the above; equal on every trainer rank and every receiver before the first byte moves."""


class JoinSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to enter one weight group. Rank 0 is the trainer's; an engine's ranks start at `first_rank`."""

    host: str
    port: int
    """Of the TCPStore that trainer rank 0 serves."""
    generation: int
    """Rises with each rebuild of the group; part of the store's prefix, so two groups never mix."""
    first_rank: int
    world_size: int
    backend: str
    """`gloo` or `nccl`."""
    timeout_s: float


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    index: int
    incarnation: str
    num_ranks: int
    version: int


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    spec: JoinSpec
    plan: PlanSpec


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    digest: str


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int


class Received(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    checksums: list[int]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    checksums: list[int]


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    reason: str


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    pause_s: float
    """How long generation stood still."""
    wire_s: float
    load_s: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    stage: str
    reason: str


ToGenerator = Prepare | Go | Commit | Discard
ToTrainer = Hello | Ready | Received | Committed | Failed
