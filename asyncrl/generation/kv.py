"""The KV cache of the local engine: fixed slots, each row at its own position, and the attention over them.

`SlotCache` is handed to any Hugging Face causal LM as its cache; `attend` is registered as an attention implementation,
so the model's own code runs unchanged. Called by `runner.py` alone, from one thread; knows nothing of requests.

A row's result must not depend on its neighbours, bit for bit. So a row always attends over a length that follows from
its own position alone (`bucket`), and the fused attention kernel works on one row at a time inside.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

ATTENTION = "asyncrl_slots"
SMALLEST_BUCKET = 64


def bucket(length: int) -> int:
    """The attended length for a row with `length` tokens: the next of 64, 128, 256, ..."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of a step that share a bucket. `index_N` is None when they are all rows of the step, in order."""

    index_N: Tensor | None
    positions_N: Tensor
    """int64 (N,): where each row's new token stands."""
    length: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Additive masks (N, 1, 1, length) by sliding window, made once per step and used by every layer."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self.masks:
            keys_S = torch.arange(self.length, device=self.positions_N.device)
            last_N1 = self.positions_N[:, None]
            visible_NS = keys_S <= last_N1
            if window is not None:
                visible_NS &= keys_S > last_N1 - window
            zero = torch.zeros((), dtype=dtype, device=keys_S.device)
            self.masks[window] = torch.where(visible_NS, zero, -torch.inf)[:, None, None, :].to(dtype)
        return self.masks[window]


@dataclass(slots=True, kw_only=True)
class Decode:
    """One token for each of the slots `first .. first + R - 1`."""

    first: int
    positions_R: Tensor
    groups: list[Rows]


@dataclass(slots=True, kw_only=True)
class Prefill:
    """A whole prompt, alone; its keys and values are collected here instead of written to a slot."""

    keys: list[Tensor] = field(default_factory=list)
    """Per layer (kv heads, prompt length, head dim)."""
    values: list[Tensor] = field(default_factory=list)


STEP: ContextVar[Decode | Prefill] = ContextVar("asyncrl_step")


class SlotCache(Cache):
    """Keys and values of every slot: per layer (slots, kv heads, capacity, head dim), grown by doubling."""

    def __init__(self, num_slots: int) -> None:
        # Not the base's constructor: its layers hold one common length, which is what slots must not have.
        self.layers = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self.num_slots = num_slots
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):
        """What an attention layer calls with this step's keys and values, (rows, kv heads, tokens, head dim)."""
        step = STEP.get()
        if isinstance(step, Prefill):
            assert layer_idx == len(step.keys), "attention layers must run in order"
            step.keys.append(key_states[0])
            step.values.append(value_states[0])
            return key_states, value_states
        rows = slice(step.first, step.first + len(step.positions_R))
        keys, values = self.keys[layer_idx][rows], self.values[layer_idx][rows]
        index_R = torch.arange(len(keys), device=keys.device)
        keys[index_R, :, step.positions_R] = key_states[:, :, 0]
        values[index_R, :, step.positions_R] = value_states[:, :, 0]
        return keys, values

    def write(self, slots: list[int], prefill: Prefill) -> None:
        """Put a prompt's keys and values at the beginning of each of `slots`."""
        length = prefill.keys[0].shape[1]
        self._make_layers(prefill)
        self.reserve(length)
        for store, new in zip(self.keys + self.values, prefill.keys + prefill.values, strict=True):
            for slot in slots:
                store[slot, :, :length] = new

    def _make_layers(self, prefill: Prefill) -> None:
        if not self.keys:
            self.keys, self.values = map(self._empty, (prefill.keys, prefill.values))

    def _empty(self, like: list[Tensor]) -> list[Tensor]:
        return [t.new_zeros(self.num_slots, t.shape[0], self.capacity, t.shape[2]) for t in like]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in every slot. New room is zero: a masked NaN would still poison a sum."""
        wanted = bucket(length)
        if wanted > self.capacity:
            extra = wanted - self.capacity
            self.keys = [F.pad(t, (0, 0, 0, extra)) for t in self.keys]
            self.values = [F.pad(t, (0, 0, 0, extra)) for t in self.values]
            self.capacity = wanted

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only to invent positions and masks, and are given both."""
        return 0


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as Hugging Face layers call it: (rows, heads, tokens, head dim) -> (rows, tokens, heads, head dim).

    During decoding, `key` and `value` are the step's slots as `SlotCache.update` returned them, whole.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("the local engine knows neither capped attention scores nor attention sinks; use engine: vllm")
    step = STEP.get()
    if isinstance(step, Prefill):
        return _attend_prompt(query, key, value, scaling, sliding_window).transpose(1, 2), None
    # Heads that share a key head become the query's tokens: no copy of keys per head.
    kv_heads = key.shape[1]
    query = query.reshape(query.shape[0], kv_heads, query.shape[1] // kv_heads, query.shape[3])
    out = _attend_slots(step.groups, query, key, value, scaling, sliding_window)
    return out.reshape(out.shape[0], 1, -1, out.shape[3]), None


def _attend_slots(
    groups: list[Rows], query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    def part(rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=rows.mask(window, q.dtype), scale=scaling)

    if groups[0].index_N is None:
        return part(groups[0], query, key[:, :, : groups[0].length], value[:, :, : groups[0].length])
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for rows in groups:
        k, v = key[:, :, : rows.length], value[:, :, : rows.length]
        out[rows.index_N] = part(rows, query[rows.index_N], k[rows.index_N], v[rows.index_N])
    return out


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    copies = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    at = torch.arange(length, device=query.device)
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
