"""Forward passes of the local engine: prompts one at a time, decoding for many slots at once.

Called by `scheduler.py`. It decides how many rows go through the model together; it knows slots and positions, never
requests, sampling or versions.

The result of a row must not depend on how many rows run beside it, but matrix products may sum in another order for
another number of rows, and which numbers agree depends on the processor (16 and 48 but not 32 or 64 under AVX2; all
multiples of 16 under AVX-512). So decoding uses only numbers of rows that were *seen* to agree on this machine with
this model: `agreeing_sizes` compares bits once, at the start.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from asyncrl.generation.kv import ATTENTION, STEP, Decode, Prefill, Rows, SlotCache, attend, bucket

TILE = 16
"""Decoding runs in multiples of this many rows; vector units see no remainders."""

AttentionInterface.register(ATTENTION, attend)
log = logging.getLogger(__name__)


class Runner:
    """A model with a KV cache of `num_slots` slots (rounded up to a multiple of TILE)."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int) -> None:
        """Raises ValueError for a model that cannot be served from slots."""
        self._arguments = _arguments(model)
        model.set_attn_implementation(ATTENTION)
        if model.config.get_text_config()._attn_implementation != ATTENTION:
            raise ValueError(_unsuitable(model, "does not take an attention implementation"))
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.num_slots = _round_up(num_slots)
        self.cache = SlotCache(self.num_slots)
        self.sizes = [TILE]

    def prefill(self, token_ids: list[int]) -> tuple[Prefill, Tensor]:
        """Run a prompt alone. Returns its keys and values, and the logits (V,) after its last token."""
        step = Prefill()
        ids_1S = torch.tensor([token_ids], device=self.device)
        logits = self._forward(step, ids_1S, torch.arange(len(token_ids), device=self.device)[None])
        return step, logits[0, -1]

    def decode(self, tokens_B: np.ndarray, positions_B: np.ndarray, active_B: np.ndarray) -> Tensor:
        """One token for each active slot. Arrays have one entry per slot; returns logits (R, V) for slots 0..R-1.

        `positions_B` is where each token stands, which is the number of tokens the slot holds already. R covers the
        last active slot; rows of slots that are not active mean nothing.
        """
        used = int(np.flatnonzero(active_B)[-1]) + 1
        self.cache.reserve(int(positions_B[active_B].max()) + 1)
        parts = []
        first = 0
        while first < used:
            size = self._size(wanted=used - first, room=self.num_slots - first)
            rows = slice(first, first + size)
            parts.append(self._decode_rows(first, tokens_B[rows], positions_B[rows], active_B[rows]))
            first += size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _size(self, *, wanted: int, room: int) -> int:
        """The smallest agreeing number of rows that covers `wanted`, or the largest that there is room for."""
        fitting = [s for s in self.sizes if s <= room]
        return next((s for s in fitting if s >= wanted), fitting[-1])

    def _decode_rows(self, first: int, tokens_R: np.ndarray, positions_R: np.ndarray, active_R: np.ndarray) -> Tensor:
        positions_R = np.where(active_R, positions_R, 0)
        at_R = torch.from_numpy(positions_R).to(self.device)
        ids_R1 = torch.from_numpy(np.where(active_R, tokens_R, 0)).to(self.device)[:, None]
        step = Decode(first=first, positions_R=at_R, groups=self._groups(positions_R, active_R, at_R))
        return self._forward(step, ids_R1, at_R[:, None])[:, 0]

    def _groups(self, positions_R: np.ndarray, active_R: np.ndarray, at_R: Tensor) -> list[Rows]:
        lengths_R = np.array([bucket(p + 1) for p in positions_R.tolist()])
        present = np.unique(lengths_R[active_R])
        if len(present) <= 1:
            return [Rows(index_N=None, positions_N=at_R, length=int(present[0]) if len(present) else bucket(1))]
        groups = []
        for length in present:
            index_N = torch.from_numpy(np.flatnonzero((lengths_R == length) & active_R)).to(self.device)
            groups.append(Rows(index_N=index_N, positions_N=at_R[index_N], length=int(length)))
        return groups

    @torch.inference_mode()
    def _forward(self, step: Decode | Prefill, ids: Tensor, positions: Tensor) -> Tensor:
        token = STEP.set(step)
        try:
            cache = {self._arguments["cache"]: self.cache}
            return self.model(input_ids=ids, position_ids=positions, **cache, **self._arguments["fixed"]).logits
        finally:
            STEP.reset(token)


def _arguments(model: PreTrainedModel) -> dict[str, Any]:
    """How this model is called. transformers 5.24 renamed `past_key_values` to `cache`. Raises ValueError."""
    names = inspect.signature(model.forward).parameters
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := layers - {"full_attention", "sliding_attention"}:
        raise ValueError(_unsuitable(model, f"has layers of type {', '.join(sorted(unknown))}"))
    if "position_ids" not in names:
        raise ValueError(_unsuitable(model, "takes no positions"))
    fixed = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in names else {})
    return {"cache": "cache" if "cache" in names else "past_key_values", "fixed": fixed}


def _unsuitable(model: PreTrainedModel, why: str) -> str:
    return f"the local engine cannot serve {type(model).__name__}: it {why}; set generation.engine to vllm"


def agreeing_sizes(runner: Runner) -> list[int]:
    """The numbers of rows that give the same bits for a row as TILE rows do, in any place: always TILE itself first.

    Every slot gets one of TILE random contents, in another order per tile, so that a row meets other neighbours in
    other places. The model's weights must be finite. Leaves the cache empty.
    """
    kinds_B = np.array([(slot * 7 + slot // TILE) % TILE for slot in range(runner.num_slots)])
    _fill(runner, kinds_B)
    tokens_B = kinds_B % runner.model.get_input_embeddings().num_embeddings  # a vocabulary may be smaller than TILE

    def decode(size: int, rows: int) -> Tensor:
        runner.sizes = [TILE, size]
        active_B = np.arange(runner.num_slots) < rows
        return runner.decode(tokens_B, kinds_B * 6, active_B)

    first = decode(TILE, TILE)
    expected_BV = first[np.argsort(kinds_B[:TILE])[kinds_B]]
    if not torch.equal(decode(TILE, runner.num_slots), expected_BV):
        log.warning("on this processor a row's result depends on its place in the batch, even at %d rows", TILE)
    sizes = [s for s in ladder(runner.num_slots) if torch.equal(decode(s, s), expected_BV[:s])]
    runner.cache = SlotCache(runner.num_slots)
    return sorted({TILE, *sizes})


def ladder(num_slots: int) -> list[int]:
    """16, 32, 48, 64, 96, 128, 192, ...: half as much again or less from one to the next, and `num_slots`."""
    sizes = {TILE, num_slots}
    power = 2 * TILE
    while power < num_slots:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(s for s in sizes if s <= num_slots)


def _fill(runner: Runner, kinds_B: np.ndarray) -> None:
    generator = torch.Generator().manual_seed(0)
    prefill, _ = runner.prefill([0])
    runner.cache.write([0], prefill)
    runner.cache.reserve(bucket(TILE * 6))
    for store in runner.cache.keys + runner.cache.values:
        contents = torch.randn(TILE, *store.shape[1:], generator=generator)
        store.copy_(contents[kinds_B])


def _round_up(rows: int) -> int:
    return -(-rows // TILE) * TILE
