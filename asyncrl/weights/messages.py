"""The control messages of a weight sync, as the trainer's sender and a generator's follower exchange them.

    generator -> trainer   Hello(incarnation, num_ranks)             I am here; I serve `version` (-1: nothing yet);
                                                                     said again every second while idle
    trainer -> generator   Prepare(spec, digest, plan)               this is what will come, through this group
    generator -> trainer   Ready | Failed(stage, reason)             plan checked; nobody has joined anything yet
    trainer -> generator   Go(generation, digest)                    join (if the group is new), then receive
    trainer -> generator   Commit(checksums)                         that was all: serve it if it is what you received
    generator -> trainer   Committed(pause_s, wire_s, load_s)        | Failed(stage, reason), once
    trainer -> generator   Discard(reason)                           or Prepare again: another receiver broke the wire

Each but Hello and Discard names the version and the `attempt`: a number that rises with each round of orders, also over
restarts of the trainer. An answer to an earlier round is passed over, and nothing is served on the word of another one.
Plain msgspec Structs over ZeroMQ (ROUTER on the trainer, DEALER on generators); the bytes of weights never pass here.
On the wire each is two frames: SCHEMA, then msgpack. What a publish reports (SyncReport) is here too. No torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = b"asyncrl-weights-4"
"""First frame of every control message; a peer that speaks another schema is refused by name."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the plan, in Hugging Face naming."""

    name: str
    dtype: str
    """As torch prints it without the prefix: `bfloat16`, `float32`."""
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same storage (tied weights): sent once, loaded under each name."""


class PlanSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Every tensor in order and the bucket size: from these alone, sender and receiver cut identical buckets."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    num_buffers: int
    checksum: bool = True
    """Whether receivers return a checksum per bucket (otherwise an empty list)."""
    digest: str
    """SHA-256 over the above and the buckets cut from it; equal on every trainer rank and every receiver before the
    first byte moves."""


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
    attempt: int
    """That brought this version; 0: none did."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    attempt: int
    spec: JoinSpec
    digest: str
    """Of the plan."""
    plan: PlanSpec | None
    """None: the one of that digest, which this generator has agreed to before."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    attempt: int
    digest: str


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive a broadcast in the group and of the plan that were prepared, now or for an earlier version."""

    version: int
    attempt: int
    generation: int
    """Of the group."""
    digest: str
    """Of the plan."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All has been sent: serve it if these are the checksums of what was received. Not waited for before it is sent."""

    version: int
    attempt: int
    checksums: list[int]


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    reason: str


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    attempt: int
    pause_s: float
    """How long generation stood still."""
    wire_s: float
    load_s: float


FailedStage = Literal["prepare", "join", "wire", "load", "checksum", "commit"]
"""Where a generator failed. `join` and `wire` may be another member's fault and are tried again without that one."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    version: int
    attempt: int
    stage: FailedStage
    reason: str


ToGenerator = Prepare | Go | Commit | Discard
ToTrainer = Hello | Ready | Committed | Failed


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver that was left out of the rest of one publish. It may say hello again."""

    index: int
    incarnation: str
    stage: str
    reason: str


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one publish did, as trainer rank 0 saw it; other ranks know version, receivers, bytes and own times."""

    version: int
    receivers: int
    """Receivers that serve `version` because of this call."""
    dropped: tuple[Dropped, ...] = ()
    bytes: int = 0
    """Bytes of weights, once, however many receivers."""
    prepare_s: float = 0.0
    join_s: float = 0.0
    """Building the group, when its members changed."""
    gather_s: float = 0.0
    """Spent in collecting shards into buckets (overlaps wire_s)."""
    wire_s: float = 0.0
    """From the first bucket on the wire until the last has left."""
    load_s: float = 0.0
    """The slowest receiver's commit."""
    commit_s: float = 0.0
    """From then on, until every receiver serves the version: what is left to load and to check, and the commit."""
    pause_s: float = 0.0
    """The longest that any receiver's generation stood still."""
    total_s: float = 0.0


def encode(message: ToGenerator | ToTrainer) -> list[bytes]:
    """Frames of one message."""
    return [SCHEMA, msgspec.msgpack.encode(message)]


def decode_to_trainer(frames: list[bytes]) -> ToTrainer:
    """Raises ValueError on another schema, a truncated frame or a message that is not one of ToTrainer."""
    try:
        return _TO_TRAINER.decode(_body(frames))
    except msgspec.MsgspecError as error:
        raise ValueError(f"malformed weight message: {error}") from error


def decode_to_generator(frames: list[bytes]) -> ToGenerator:
    """Raises ValueError on another schema, a truncated frame or a message that is not one of ToGenerator."""
    try:
        return _TO_GENERATOR.decode(_body(frames))
    except msgspec.MsgspecError as error:
        raise ValueError(f"malformed weight message: {error}") from error


_TO_TRAINER: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
_TO_GENERATOR: msgspec.msgpack.Decoder[ToGenerator] = msgspec.msgpack.Decoder(ToGenerator)


def _body(frames: list[bytes]) -> bytes:
    if len(frames) != 2 or frames[0] != SCHEMA:
        raise ValueError(f"expected two frames, the first {SCHEMA!r}; got {len(frames)}, the first {frames[:1]!r:.60}")
    return frames[1]
