"""What a trainer rank asks of a reference process and what it answers. Pure: messages and arrays to frames and back.

    trainer rank -> reference   Load(model)                       be ready with this model; also says: are you there?
    trainer rank -> reference   Score(model, temperature, sizes)  one packed micro-batch, in the payload frame
    trainer rank -> reference   Again(seqs)                       have these been answered?
    reference -> trainer rank   Scored()                          fp32 log-probabilities of its trained tokens
    reference -> trainer rank   Pending(ready, why, unknown)      to Load and Again: what goes on, what to send in full
    reference -> trainer rank   Refused(message)                  a Score that makes no sense here

Framing, seal and limits are the replay server's (replay/wire.py). A Score is answered by its `seq`; computing it twice
gives the same, so a rank that hears nothing asks the same of another process. The payload of a Score is one frame,
little-endian: lengths i4 | token ids i4 | predictors i4, as training/packing.py lays a micro-batch out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from asyncrl.replay import wire
from asyncrl.replay.messages import Count, Name, Text
from asyncrl.replay.wire import Frame

MAX_SEQS = 1 << 16
Size = Annotated[int, msgspec.Meta(ge=0, le=wire.MAX_FRAME_BYTES // 4)]
Seqs = Annotated[list[Count], msgspec.Meta(max_length=MAX_SEQS)]
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")


@dataclass(slots=True, kw_only=True, frozen=True)
class Packed:
    """One micro-batch as a reference sees it: sequences end to end."""

    lengths: np.ndarray
    """int32 (number of sequences,): never 0; their sum is the length of `token_ids_S`."""
    token_ids_S: np.ndarray
    """int32."""
    predictors_T: np.ndarray
    """int32: position in `_S` whose hidden state predicts the token after it, which is asked about."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model: Text


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model: Text
    temperature: float
    sizes: tuple[Size, Size, Size]
    """Of the payload's three arrays."""


class Again(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    seqs: Seqs


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ready: bool
    """It holds the model. One that does not yet is given no work, so that nothing waits behind its loading."""
    why: Text
    unknown: Seqs = []


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    message: Text


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds every request. `seq` rises by one per Score of one incarnation; it is 0 for the others."""

    incarnation: Name
    rank: Count
    seq: Count
    body: Load | Score | Again


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds every reply. `seq` is the request's."""

    seq: Count
    body: Scored | Pending | Refused


def pack_score(packed: Packed, *, model: str, temperature: float) -> tuple[Score, Frame]:
    """A micro-batch -> the request and its payload."""
    parts = (packed.lengths, packed.token_ids_S, packed.predictors_T)
    sizes = (len(parts[0]), len(parts[1]), len(parts[2]))
    body = np.concatenate([np.asarray(part, _INT) for part in parts])
    return Score(model=model, temperature=temperature, sizes=sizes), body.tobytes()


def unpack_score(score: Score, payload: Sequence[Frame]) -> Packed:
    """The micro-batch of a Score. Raises ValueError when it is none."""
    (values,) = _arrays(payload, _INT, sum(score.sizes))
    first, second = score.sizes[0], score.sizes[0] + score.sizes[1]
    lengths, ids, predictors = values[:first], values[first:second], values[second:]
    if not len(lengths) or lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != len(ids):
        raise ValueError(f"{len(ids)} token ids do not make {len(lengths)} sequences of the lengths given")
    if ids.min() < 0:
        raise ValueError(f"a token id must be at least 0, got {ids.min()}")
    if len(predictors) and not 0 <= predictors.min() <= predictors.max() < len(ids) - 1:
        raise ValueError(f"predictors must lie within {len(ids)} tokens and before the last one")
    if not score.temperature > 0:
        raise ValueError(f"the temperature must be positive, got {score.temperature}")
    return Packed(lengths=lengths, token_ids_S=ids, predictors_T=predictors)


def unpack_logprobs(payload: Sequence[Frame], *, num_tokens: int) -> np.ndarray:
    """The payload of a Scored: float32 (T,). Raises ValueError when it has another length."""
    return _arrays(payload, _FLOAT, num_tokens)[0].astype(np.float32)


def pack_logprobs(logprobs_T: np.ndarray) -> Frame:
    return np.asarray(logprobs_T, _FLOAT).tobytes()


def unpack_request(frame: Frame) -> Envelope:
    """Header frame of a request. Raises ValueError."""
    return wire.unpack_header(frame, _REQUESTS)


def unpack_reply(frame: Frame) -> ReplyEnvelope:
    """Header frame of a reply. Raises ValueError."""
    return wire.unpack_header(frame, _REPLIES)


def _arrays(payload: Sequence[Frame], dtype: np.dtype, size: int) -> list[np.ndarray]:
    got = [memoryview(frame).nbytes for frame in payload]
    if got != [size * dtype.itemsize]:
        raise ValueError(f"expected one frame of {size * dtype.itemsize} bytes after the header, got {got}")
    return [np.frombuffer(frame, dtype) for frame in payload]


_REQUESTS = msgspec.msgpack.Decoder(Envelope)
_REPLIES = msgspec.msgpack.Decoder(ReplyEnvelope)
