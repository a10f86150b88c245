"""Sequences of different lengths -> micro-batches without padding, the same number on every rank, balanced by cost.

Called by step.py and sft.py on every rank: the plan is a pure function of the lengths, so all ranks make the same one
and each takes its part. Nothing here knows about torch, devices or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Plan = list[list[np.ndarray]]
"""Rank -> micro-batches -> indices of the sequences in it, ascending; an empty array is a micro-batch of nothing."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Packed:
    """The layout of one micro-batch: sequences end to end. What is not trained is present here and absent from `_T`."""

    token_ids_S: np.ndarray
    """int64: prompts and responses end to end."""
    positions_S: np.ndarray
    """int64: position within its own sequence."""
    lengths: np.ndarray
    """int64 (number of sequences,): their lengths, in order; never 0."""
    predictors_T: np.ndarray
    """int64: position in `_S` whose hidden state predicts the trained token, that is, one before it."""
    targets_T: np.ndarray
    """int64: the trained tokens."""
    sequence_T: np.ndarray
    """int64: index of the sequence within this micro-batch, non-decreasing."""


def plan(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    budget: int,
    count: int | None = None,
    quadratic: float = 1e-3,
) -> Plan:
    """Lengths of the sequences -> who computes what.

    `budget` bounds the tokens of a micro-batch; `count` fixes the number of micro-batches per rank instead. The cost of
    a sequence of n tokens is n + quadratic * n^2 (attention). Deterministic: ties go to the lower index. Raises
    ValueError when a sequence alone exceeds the budget or has no token.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a sequence to pack has length {lengths.min()}: give only sequences with tokens")
    if count is None and len(lengths) and lengths.max() > budget:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens does not fit training.tokens_per_micro_batch = {budget}; "
            "raise it to at least training.seq_len"
        )
    costs = lengths + quadratic * lengths.astype(np.float64) ** 2
    if count is not None:
        bins = _fill(lengths, costs, count * num_ranks, None)
        assert bins is not None
        return _deal(bins, costs, num_ranks)
    per_rank = max(1, -(-int(lengths.sum()) // (budget * num_ranks)))
    while (bins := _fill(lengths, costs, per_rank * num_ranks, budget)) is None:
        per_rank += 1
    return _deal(bins, costs, num_ranks)


def _fill(lengths: np.ndarray, costs: np.ndarray, num_bins: int, budget: int | None) -> list[list[int]] | None:
    """Longest first, each into the cheapest bin that has room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens, load = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    for index in np.argsort(-lengths, kind="stable"):
        open_load = load if budget is None else np.where(tokens + lengths[index] <= budget, load, np.inf)
        best = int(np.argmin(open_load))
        if not np.isfinite(open_load[best]):
            return None
        bins[best].append(int(index))
        tokens[best] += lengths[index]
        load[best] += costs[index]
    return bins


def _deal(bins: list[list[int]], costs: np.ndarray, num_ranks: int) -> Plan:
    """Bins of similar cost run at the same time on different ranks, since ranks wait for each other after each."""
    ordered = sorted(bins, key=lambda b: (-costs[b].sum(), b))
    dealt: Plan = [[] for _ in range(num_ranks)]
    for position, members in enumerate(ordered):
        dealt[position % num_ranks].append(np.array(sorted(members), dtype=np.int64))
    return dealt


def pack(token_ids: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> Packed:
    """Sequences (prompt and response) with a mask of their trained tokens -> one micro-batch.

    With no sequence at all the result holds one token that trains nothing: the ranks run their collectives together, so
    each must run something. Raises ValueError when the first token of a sequence is trained: nothing predicts it.
    """
    if not token_ids:
        token_ids, trained = [np.zeros(1, np.int64)], [np.zeros(1, bool)]
    lengths = np.array([len(ids) for ids in token_ids], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    mask_S = np.concatenate(trained).astype(bool)
    if mask_S[starts].any():
        raise ValueError("the first token of a sequence cannot be trained: give every prompt at least one token")
    return repack(lengths, np.concatenate(token_ids), np.flatnonzero(mask_S) - 1)


def repack(lengths: np.ndarray, token_ids_S: np.ndarray, predictors_T: np.ndarray) -> Packed:
    """The layout from its three independent parts (any integer type): what another process needs to be sent of it."""
    ids_S, lengths, predictors_T = (a.astype(np.int64) for a in (token_ids_S, lengths, predictors_T))
    starts, trained_S = np.cumsum(lengths) - lengths, predictors_T + 1
    return Packed(
        token_ids_S=ids_S,
        positions_S=np.arange(len(ids_S)) - np.repeat(starts, lengths),
        lengths=lengths,
        predictors_T=predictors_T,
        targets_T=ids_S[trained_S],
        sequence_T=np.repeat(np.arange(len(lengths)), lengths)[trained_S],
    )
