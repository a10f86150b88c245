"""Bytes on the wire: a msgspec header frame, then raw array frames. Nothing else crosses between processes.

Called by the clients, the server and the journal. Pure: no sockets. Never unpickles, and never allocates more than a
small multiple of the bytes that really arrived: every size is checked before an array is made. Whatever the bytes are,
the answer is the value or a ValueError that says what was wrong.

    message   header frame [+ payload frames]       header = b"ARL" + schema version + msgpack(Envelope) + seal
    group     2 frames, header and body: the arrays of all episodes one after the other, little-endian and raw,
              prompt ids i4 | token ids i4 | log-probabilities f4 | versions i4 | mask u1 | texts utf-8
              (prompt ids once when all siblings share them)

One body frame and not six: below about 64 KB a frame costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from asyncrl.replay import messages
from asyncrl.replay.messages import Reply, Request
from asyncrl.replay.seal import digest_of, seal
from asyncrl.types import NOT_SAMPLED, Episode, FinishReason, Group, Prompt

SCHEMA_VERSION = 1
PREFIX = b"ARL" + bytes([SCHEMA_VERSION])
FRAMES_PER_GROUP = 2
PROCESS_DIGITS = 8
"""Of an incarnation, which stand for the process; the others stand for one of its connections."""
MAX_HEADER_BYTES = 4 << 20
"""Longest header frame: prompts, metadata and counts; token arrays and texts travel in frames of their own."""
MAX_FRAME_BYTES = 1 << 30
"""Longest frame of any kind; the sockets refuse longer ones before they allocate."""
MAX_EPISODES = 1 << 16
_CONVERSIONS = (np.int32, np.int32, np.float32, np.int32, np.uint8)
_BYTES: np.dtype = np.dtype(np.uint8)
_least, _greatest = np.minimum.reduce, np.maximum.reduce
_DTYPES = tuple(np.dtype(t).newbyteorder("<") for t in _CONVERSIONS)

Frame = bytes | bytearray | memoryview
"""Anything with the buffer protocol: the server keeps zmq.Frame objects and passes them on without a copy."""
Lengths = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_BYTES)]], msgspec.Meta(max_length=MAX_EPISODES)]
T = TypeVar("T")


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds every request. `seq` rises by one per request of one incarnation and identifies a retry."""

    incarnation: messages.Name
    """Random: of the process, and of its connection (PROCESS_DIGITS)."""
    seq: messages.Count
    acked: messages.Count
    """All replies to requests below this number have arrived or are no longer wanted."""
    role: messages.Name
    index: messages.Count
    body: Request


class Sender(msgspec.Struct, frozen=True, array_like=True):
    """An envelope whose body is not looked at: whom to tell that it makes no sense."""

    incarnation: messages.Name
    seq: messages.Count
    acked: messages.Count
    role: messages.Name
    index: messages.Count
    body: msgspec.Raw


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds every reply. `incarnation` is the server's."""

    incarnation: str
    seq: int
    body: Reply


class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """What the server reads of a group. `detail` stays packed until a trainer unpacks the group."""

    lease_id: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
    prompt_lengths: Lengths
    """One entry when all episodes share the prompt, else one per episode."""
    lengths: Lengths
    """Tokens after the prompt, per episode."""
    text_lengths: Lengths
    """Bytes of UTF-8, per episode."""
    rewards: Annotated[list[float], msgspec.Meta(max_length=MAX_EPISODES)]
    detail: msgspec.Raw


class GroupDetail(msgspec.Struct, frozen=True, array_like=True):
    """The rest of a group's header."""

    prompt: Prompt
    finish_reasons: Annotated[list[FinishReason], msgspec.Meta(max_length=MAX_EPISODES)]
    named_rewards: list[dict[str, float]]
    metadata: list[dict[str, Any]]


def pack_message(
    envelope: msgspec.Struct, payload: Sequence[Frame] = (), digests: Sequence[bytes] | None = None
) -> list[Frame]:
    """Envelope -> frames, sealed: for `seal.unseal`, which gives back header and payload.

    `digests`: of the payload, when they are known. Raises ValueError when the header is longer than a receiver accepts.
    """
    header = _pack_header(envelope)
    return [header + seal(header, [digest_of(f) for f in payload] if digests is None else digests), *payload]


def unpack_request(frame: Frame) -> Envelope:
    """Header frame of a request -> Envelope. Raises ValueError."""
    return unpack_header(frame, _REQUESTS)


def unpack_sender(frame: Frame) -> Sender:
    """Who sent a request whose body cannot be read. Raises ValueError when that cannot be read either."""
    return unpack_header(frame, _SENDERS)


def unpack_reply(frame: Frame) -> ReplyEnvelope:
    """Header frame of a reply -> ReplyEnvelope. Raises ValueError."""
    return unpack_header(frame, _REPLIES)


def pack_group(group: Group) -> list[Frame]:
    """Group -> header and body. Raises ValueError when its arrays do not align or its metadata is not plain data."""
    episodes = group.episodes
    for e in episodes:
        _check_aligned(e, group.prompt.id)
    texts = [e.text.encode("utf-8", "surrogatepass") for e in episodes]
    prompts = _shared_prompts(episodes)
    detail = GroupDetail(
        group.prompt, [e.finish_reason for e in episodes], [e.rewards for e in episodes], [e.metadata for e in episodes]
    )
    header = GroupHeader(
        group.lease_id,
        [len(p) for p in prompts],
        [len(e.token_ids) for e in episodes],
        [len(t) for t in texts],
        [float(e.reward) for e in episodes],
        msgspec.Raw(_encode(detail)),
    )
    columns = (
        prompts,
        [e.token_ids for e in episodes],
        [e.logprobs for e in episodes],
        [e.versions for e in episodes],
        [e.loss_mask for e in episodes],
    )
    spans = _spans(header)
    body = np.empty(spans[-1].stop, np.uint8)
    for column, span, dtype in zip(columns, spans, _DTYPES, strict=False):
        np.concatenate(column, out=body[span].view(dtype), casting="unsafe")
    body[spans[-1]] = np.frombuffer(b"".join(texts), np.uint8)
    return [_pack_header(header), body.data if body.size else b""]


def unpack_group(frames: Sequence[Frame], *, newest: int | None = None) -> Group:
    """Header and body -> Group; versions above `newest` become `newest`. Raises ValueError.

    Its arrays are views of the body where that can be written to, as a received frame can; else they are copies.
    """
    header = check_group(frames)
    detail: GroupDetail = _decode(header.detail, _DETAIL)
    G = len(header.lengths)
    if not len(detail.finish_reasons) == len(detail.named_rewards) == len(detail.metadata) == G:
        raise ValueError(f"a group's header must describe {G} episodes in every field")
    *arrays, texts_frame = columns_of(header, frames[1])
    if arrays[4].size and _greatest(arrays[4]) > 1:
        raise ValueError("a group's mask must hold 0 and 1 only")
    prompts, ids, logprobs, versions, mask = (_own(a, t) for a, t in zip(arrays, _CONVERSIONS, strict=True))
    if newest is not None:
        np.minimum(versions, newest, out=versions)
    prompt_parts = _cut(prompts, header.prompt_lengths) * (G if len(header.prompt_lengths) == 1 else 1)
    columns = [_cut(a, header.lengths) for a in (ids, logprobs, versions, mask.view(bool))]
    texts = _cut(texts_frame.tobytes(), header.text_lengths)
    episodes = [
        Episode(
            prompt_ids=prompt_parts[i],
            token_ids=columns[0][i],
            logprobs=columns[1][i],
            versions=columns[2][i],
            loss_mask=columns[3][i],
            reward=header.rewards[i],
            finish_reason=detail.finish_reasons[i],
            rewards=detail.named_rewards[i],
            text=str(texts[i], "utf-8", "surrogatepass"),
            metadata=detail.metadata[i],
        )
        for i in range(G)
    ]
    return Group(lease_id=header.lease_id, prompt=detail.prompt, episodes=episodes)


def check_group(frames: Sequence[Frame]) -> GroupHeader:
    """The header of a group whose body has exactly the size that it announces; ValueError otherwise."""
    if len(frames) != FRAMES_PER_GROUP:
        raise ValueError(f"a group has {FRAMES_PER_GROUP} frames, got {len(frames)}")
    header: GroupHeader = unpack_header(frames[0], _GROUPS)
    G, num_prompts = len(header.lengths), len(header.prompt_lengths)
    if G == 0 or num_prompts not in (1, G) or len(header.text_lengths) != G or len(header.rewards) != G:
        raise ValueError(f"a group's header must describe {max(G, 1)} episodes in every field")
    expected = 4 * sum(header.prompt_lengths) + 13 * sum(header.lengths) + sum(header.text_lengths)
    if (got := _size(frames[1])) != expected:
        raise ValueError(f"a group's body must have {expected} bytes as its header says, got {got}")
    return header


def version_range(header: GroupHeader, body: Frame) -> tuple[int, int]:
    """Smallest and largest version among the trained tokens of a checked group; NOT_SAMPLED when there is none.

    Raises ValueError when the mask holds anything but 0 and 1, or a trained token has no version.
    """
    P, T = 4 * sum(header.prompt_lengths), sum(header.lengths)
    if not T:
        return NOT_SAMPLED, NOT_SAMPLED
    versions, mask = np.frombuffer(body, _DTYPES[3], T, P + 8 * T), np.frombuffer(body, np.uint8, T, P + 12 * T)
    most = _greatest(mask)
    if most > 1:
        raise ValueError("a group's mask must hold 0 and 1 only")
    if most == 0:
        return NOT_SAMPLED, NOT_SAMPLED
    if _least(mask) == 0:
        versions = versions[mask.view(bool)]
    if (oldest := int(_least(versions))) < 0:
        raise ValueError(f"a trained token must have the version that sampled it, got {oldest}")
    return oldest, int(_greatest(versions))


def columns_of(header: GroupHeader, body: Frame) -> list[np.ndarray]:
    """Views of a body: prompt ids, token ids, log-probabilities, versions, mask, and the bytes of the texts."""
    whole = np.frombuffer(body, np.uint8)
    return [whole[span].view(dtype) for span, dtype in zip(_spans(header), (*_DTYPES, _BYTES), strict=True)]


def _spans(header: GroupHeader) -> list[slice]:
    """Where each column lies in the body."""
    P, T = 4 * sum(header.prompt_lengths), sum(header.lengths)
    ends = (0, P, P + 4 * T, P + 8 * T, P + 12 * T, P + 13 * T, P + 13 * T + sum(header.text_lengths))
    return [slice(a, b) for a, b in pairwise(ends)]


def _shared_prompts(episodes: list[Episode]) -> list[np.ndarray]:
    prompts = [e.prompt_ids for e in episodes]
    first = prompts[0].tobytes() if prompts else b""
    return prompts[:1] if all(p is prompts[0] or p.tobytes() == first for p in prompts) else prompts


def _check_aligned(episode: Episode, prompt_id: int) -> None:
    arrays = (episode.token_ids, episode.logprobs, episode.versions, episode.loss_mask)
    if not len(arrays[0]) == len(arrays[1]) == len(arrays[2]) == len(arrays[3]):
        raise ValueError(
            f"prompt {prompt_id}: token_ids, logprobs, versions and loss_mask must have one length, "
            f"got {[len(a) for a in arrays]}"
        )


def _own(column: np.ndarray, kind: Any) -> np.ndarray:
    """The column itself if its owner may write to it and its numbers are this machine's, else a copy."""
    flags = column.flags
    return column.astype(kind, copy=not (flags.writeable and flags.aligned))


def _cut(whole: Any, lengths: list[int]) -> list[Any]:
    return [whole[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]


def _pack_header(header: msgspec.Struct) -> bytes:
    data = PREFIX + _encode(header)
    if len(data) > MAX_HEADER_BYTES:
        raise ValueError(f"a header may have {MAX_HEADER_BYTES} bytes, got {len(data)}: shorten prompts or metadata")
    return data


def unpack_header(frame: Frame, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Header frame -> what `decoder` makes of it. Raises ValueError."""
    view = memoryview(frame)
    if view.nbytes > MAX_HEADER_BYTES:
        raise ValueError(f"a header may have {MAX_HEADER_BYTES} bytes, got {view.nbytes}")
    start = bytes(view[:4])
    if start != PREFIX:
        if start[:3] != PREFIX[:3]:
            raise ValueError(f"not a message of asyncrl: it starts with {start!r}")
        raise ValueError(
            f"the message has schema version {start[3] if len(start) > 3 else None}, this side speaks "
            f"{SCHEMA_VERSION}: run the same asyncrl everywhere"
        )
    return _decode(view[4:], decoder)


def _decode(data: Frame | msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(f"malformed message: {error}") from error


def _encode(value: Any) -> bytes:
    try:
        return _ENCODER.encode(value)
    except (TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"not plain data, so it cannot be sent: {error}") from error


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays in targets and metadata travel as numbers and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of null, bool, number, string, list, dict")


def _size(frame: Frame) -> int:
    return memoryview(frame).nbytes


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_REQUESTS = msgspec.msgpack.Decoder(Envelope)
_SENDERS = msgspec.msgpack.Decoder(Sender)
_REPLIES = msgspec.msgpack.Decoder(ReplyEnvelope)
_GROUPS = msgspec.msgpack.Decoder(GroupHeader)
_DETAIL = msgspec.msgpack.Decoder(GroupDetail)
