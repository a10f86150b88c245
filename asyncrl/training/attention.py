"""Attention over packed sequences that never crosses a sequence boundary, for any Hugging Face causal LM.

model.py registers these functions with transformers and passes a `Layout` as a keyword argument that the model hands
down to its attention layers. Three ways to compute the same: `sdpa` (anywhere: rows are padded inside attention alone,
in buckets of similar length, so that plain causal attention is exact), `flash` (torch's variable-length FlashAttention,
half precision on GPUs) and `flex` (a block mask, compiled on GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.training.packing import Packed

Kind = Literal["sdpa", "flash", "flex"]
BUCKET_RATIO = 0.5
"""A row joins a bucket when it is at least this share of its longest: fewer calls against padding (measured)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Rows:
    """Sequences as padded rows in buckets of similar length, for `sdpa`."""

    buckets: tuple[Tensor, ...]
    """int64 (rows, longest) each: positions in the packed order; padding repeats a row's last position."""
    kept: tuple[Tensor, ...]
    """int64 each: the flat places in a bucket that are not padding."""
    order_S: Tensor
    """int64 (S,): where in the buckets' kept places, end to end, each packed position is."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    """Where the sequences of one micro-batch lie. Made once per micro-batch, read by every layer."""

    cu_seqlens: Tensor
    """int32 (sequences + 1,): where each begins, and the end."""
    max_length: int
    rows: Rows | None = None
    """What `sdpa` needs; None for the others."""
    block_mask: Any = None
    """What `flex` needs; None for the others."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedInput:
    """One micro-batch as tensors: what the policy's forward takes."""

    input_ids_S: Tensor
    positions_S: Tensor
    layout: Layout
    predictors_T: Tensor
    targets_T: Tensor


def packed_input(packed: Packed, device: torch.device | str, kind: Kind = "sdpa") -> PackedInput:
    """A packed micro-batch on its device, with what one kind of attention needs."""

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedInput(
        input_ids_S=put(packed.token_ids_S),
        positions_S=put(packed.positions_S),
        layout=make_layout(packed.lengths, device, kind),
        predictors_T=put(packed.predictors_T),
        targets_T=put(packed.targets_T),
    )


def make_layout(lengths: np.ndarray, device: torch.device | str, kind: Kind = "sdpa") -> Layout:
    """Lengths of the sequences, in order -> their layout."""
    ends = np.cumsum(lengths)
    return Layout(
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        max_length=int(lengths.max()),
        rows=_make_rows(lengths, device) if kind == "sdpa" else None,
        block_mask=_block_mask(lengths, device) if kind == "flex" else None,
    )


def _make_rows(lengths: np.ndarray, device: torch.device | str) -> Rows:
    ends = np.cumsum(lengths)
    starts, buckets, kept, places = ends - lengths, [], [], []
    for rows in _buckets(lengths):
        longest = int(lengths[rows].max())
        offsets = np.minimum(np.arange(longest)[None], lengths[rows][:, None] - 1)
        inside = np.arange(longest)[None] < lengths[rows][:, None]
        positions = starts[rows][:, None] + offsets
        buckets.append(positions)
        kept.append(np.flatnonzero(inside))
        places.append(positions[inside])
    order = np.empty(int(ends[-1]), np.int64)
    order[np.concatenate(places)] = np.arange(len(order))
    return Rows(
        buckets=tuple(torch.from_numpy(b).to(device) for b in buckets),
        kept=tuple(torch.from_numpy(k).to(device) for k in kept),
        order_S=torch.from_numpy(order).to(device),
    )


def _block_mask(lengths: np.ndarray, device: torch.device | str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    sequence_S = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)

    def same_sequence_and_earlier(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (sequence_S[q] == sequence_S[k]) & (q >= k)

    size = len(sequence_S)
    return create_block_mask(same_sequence_and_earlier, None, None, size, size, device=str(device))


def _buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Sequences of similar length together, longest first."""
    buckets: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable"):
        if buckets and lengths[index] >= BUCKET_RATIO * lengths[buckets[-1][0]]:
            buckets[-1].append(int(index))
        else:
            buckets.append([int(index)])
    return [np.array(sorted(bucket)) for bucket in buckets]


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **ignored: Any,  # transformers passes dropout and others here; dropout is always off (model.py)
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; query (1, heads, S, D) -> (1, S, heads, D)."""
    layout = _given(layout, module)
    key, value = _all_heads(query, key, value)
    rows, pieces = layout.rows, []
    assert rows is not None
    for positions, kept in zip(rows.buckets, rows.kept, strict=True):
        q, k, v = (_rows(tensor, positions) for tensor in (query, key, value))
        band = _band(positions.shape[1], sliding_window, query.device)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scaling)
        pieces.append(out.transpose(1, 2).flatten(0, 1)[kept])
    return torch.cat(pieces)[rows.order_S][None], None


def _rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """(1, heads, S, D) -> (rows, heads, longest, D)."""
    rows, longest = positions.shape
    return tensor[0].index_select(1, positions.flatten()).unflatten(1, (rows, longest)).transpose(0, 1)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a sliding window, or None when the window covers the longest row."""
    if window is None or window >= length:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)


def flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The same through torch's variable-length FlashAttention; half precision, GPUs from Ampere on."""
    from torch.nn.attention.varlen import varlen_attn

    layout = _given(layout, module)
    key, value = _all_heads(query, key, value)
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    assert isinstance(out, Tensor)
    return out[None], None


def flex(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    **ignored: Any,  # model.py refuses sliding windows with flex
) -> tuple[Tensor, None]:
    """The same through torch's flex attention with the layout's block mask."""
    layout = _given(layout, module)
    attend = _compiled_flex() if query.is_cuda else _flex()
    out = attend(query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Any:
    return torch.compile(_flex(), dynamic=True)


def _given(layout: Layout | None, module: nn.Module) -> Layout:
    """Without a layout there is no boundary to respect: the model kept the keyword argument to itself."""
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} gets no packing layout from its model, which cannot be trained packed"
        )
    return layout


def _all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for grouped queries: not every torch that we support groups them itself."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
