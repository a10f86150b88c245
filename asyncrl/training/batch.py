"""Groups -> the sequences of one optimiser batch with everything a loss needs -> this rank's micro-batches.

`prepare` runs on rank 0 and judges the whole batch: advantages, weights, ages. Its result travels to all ranks as
bytes; each makes its own micro-batches from it. Arrays alone here: no process, no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import msgspec
import numpy as np
import torch

from asyncrl.algorithm import Algorithm
from asyncrl.config import Config
from asyncrl.losses.aggregation import token_weights
from asyncrl.training.attention import Kind, PackedInput, packed_input
from asyncrl.training.packing import pack, plan
from asyncrl.training.ranks import Ranks
from asyncrl.types import Batch, Episode, Group


@dataclass(slots=True, kw_only=True, frozen=True)
class Sequences:
    """One batch, flat: `_B` per sequence, `_N` per position of all sequences end to end (prompts included)."""

    lengths_B: np.ndarray
    token_ids_N: np.ndarray
    trained_N: np.ndarray
    """bool: sampled, not masked, and its log-probability is a number."""
    behaviour_N: np.ndarray
    """float32: log mu; 0 where not trained."""
    lags_N: np.ndarray
    """int32: trainer version minus the token's; 0 where not trained."""
    advantages_B: np.ndarray
    rewards_B: np.ndarray
    weights_B: np.ndarray
    """float64: aggregation weight of each token, over its minibatch's global batch."""
    minibatch_B: np.ndarray
    """int32: which optimiser step of the batch the sequence belongs to."""

    def encode(self) -> bytes:
        """As bytes: a JSON header (name, dtype, shape), a newline, then the arrays' memory."""
        arrays = [(field.name, np.ascontiguousarray(getattr(self, field.name))) for field in fields(self)]
        header = [(name, array.dtype.str, array.shape) for name, array in arrays]
        return b"".join([msgspec.json.encode(header), b"\n", *(array.tobytes() for _, array in arrays)])

    @staticmethod
    def decode(data: bytes) -> Sequences:
        """The inverse of `encode`."""
        end = data.index(b"\n")
        offset, arrays = end + 1, {}
        for name, dtype, shape in msgspec.json.decode(data[:end]):
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape)
            offset += arrays[name].nbytes
        return Sequences(**arrays)


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroBatch:
    """What one forward and backward pass takes."""

    inputs: PackedInput
    batch: Batch
    num_tokens: int
    """Positions computed, prompts included."""


def prepare(groups: Sequence[Group], *, algo: Algorithm, config: Config, step: int, version: int) -> Sequences:
    """Judge the batch of `step`, which weights of `version` are about to be trained on.

    Raises RuntimeError when a token is older than replay.max_lag or from the future, when group sizes differ, or when
    advantages are not finite; ValueError when a sequence is longer than training.seq_len.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    advantages_B = _advantages(groups, algo)
    for group in groups:
        _refuse(group, config=config, version=version)
    masks = [_trained(episode, algo) for episode in episodes]
    trained_N = _flat(episodes, masks, False)
    lengths = np.array([int(episode.loss_mask.sum()) for episode in episodes], dtype=np.int64)
    minibatch_B = _minibatches(groups, count=config.training.minibatches, seed=config.seed, step=step)
    weights_B = np.zeros(len(episodes))
    for index in range(config.training.minibatches):
        chosen = minibatch_B == index
        weights_B[chosen] = token_weights(algo.aggregation, lengths[chosen], config.generation.max_tokens)
    return Sequences(
        lengths_B=np.array([len(e.prompt_ids) + e.num_tokens for e in episodes], dtype=np.int64),
        token_ids_N=np.concatenate([a for e in episodes for a in (e.prompt_ids, e.token_ids)]).astype(np.int32),
        trained_N=trained_N,
        behaviour_N=np.where(trained_N, _flat(episodes, [e.logprobs for e in episodes], 0.0), 0.0).astype(np.float32),
        lags_N=np.where(trained_N, version - _flat(episodes, [e.versions for e in episodes], 0), 0).astype(np.int32),
        advantages_B=advantages_B,
        rewards_B=np.array([episode.reward for episode in episodes], dtype=np.float64),
        weights_B=weights_B,
        minibatch_B=minibatch_B,
    )


def _advantages(groups: Sequence[Group], algo: Algorithm) -> np.ndarray:
    sizes = {len(group.episodes) for group in groups}
    if sizes != {algo.n_samples}:
        raise RuntimeError(
            f"groups of {sorted(sizes)} episodes arrived, expected {algo.n_samples} in each (algo.n_samples)"
        )
    rewards_PG = np.stack([group.rewards_G for group in groups])
    advantages_PG = np.asarray(algo.advantages(rewards_PG), dtype=np.float64)
    if advantages_PG.shape != rewards_PG.shape or not np.isfinite(advantages_PG).all():
        raise RuntimeError(
            f"{type(algo).__name__}.advantages must return finite values of shape {rewards_PG.shape}; got shape "
            f"{advantages_PG.shape} with {int((~np.isfinite(advantages_PG)).sum())} values that are not finite"
        )
    return advantages_PG.reshape(-1)


def _refuse(group: Group, *, config: Config, version: int) -> None:
    for episode in group.episodes:
        total = len(episode.prompt_ids) + episode.num_tokens
        if total > config.training.seq_len or not len(episode.prompt_ids):
            raise ValueError(
                f"prompt {group.prompt.id}: a sequence of {total} tokens with a prompt of {len(episode.prompt_ids)}; "
                f"expected a prompt and at most training.seq_len = {config.training.seq_len} tokens"
            )
        versions = episode.versions[episode.loss_mask]
        limit = config.replay.max_lag
        if len(versions) and not 0 <= version - versions.max() <= version - versions.min() <= (limit or 0):
            raise RuntimeError(
                f"prompt {group.prompt.id} has tokens of versions {versions.min()} to {versions.max()}, but version "
                f"{version} is being trained and replay.max_lag is {limit}: the replay buffer broke its bound"
            )


def _trained(episode: Episode, algo: Algorithm) -> np.ndarray:
    if not algo.trains(episode):
        return np.zeros(episode.num_tokens, dtype=bool)
    return episode.loss_mask.astype(bool) & np.isfinite(episode.logprobs)


def _flat(episodes: Sequence[Episode], parts: Sequence[np.ndarray], before: float | bool) -> np.ndarray:
    """Values per response token -> values per position, `before` over the prompts."""
    return np.concatenate(
        [
            a
            for e, part in zip(episodes, parts, strict=True)
            for a in (np.full(len(e.prompt_ids), before, part.dtype), part)
        ]
    )


def _minibatches(groups: Sequence[Group], *, count: int, seed: int, step: int) -> np.ndarray:
    """Groups dealt at random, each whole, into `count` equal minibatches; int32 per sequence."""
    order = np.random.default_rng([seed, step]).permutation(len(groups)) if count > 1 else np.arange(len(groups))
    of_group = np.empty(len(groups), np.int32)
    of_group[order] = np.arange(len(groups)) * count // len(groups)
    return np.repeat(of_group, [len(group.episodes) for group in groups])


def micro_batches(sequences: Sequences, *, config: Config, ranks: Ranks, kind: Kind = "sdpa") -> list[list[MicroBatch]]:
    """This rank's micro-batches, per minibatch. All ranks get the same number; some may hold nothing."""
    starts_B = np.cumsum(sequences.lengths_B) - sequences.lengths_B
    trained_B = np.add.reduceat(sequences.trained_N, starts_B) > 0
    result = []
    for index in range(config.training.minibatches):
        members = np.flatnonzero(trained_B & (sequences.minibatch_B == index))
        dealt = plan(
            sequences.lengths_B[members],
            num_ranks=ranks.size,
            budget=config.training.tokens_per_micro_batch,
            count=config.training.gradient_accumulation_steps,
        )
        result.append([make_micro_batch(sequences, members[i], ranks.device, kind) for i in dealt[ranks.rank]])
    return result


def make_micro_batch(
    sequences: Sequences, members: Iterable[int], device: torch.device | str, kind: Kind
) -> MicroBatch:
    """The sequences `members`, packed, and what a loss sees of their trained tokens."""
    members = np.asarray(list(members), dtype=np.int64)
    ends_B = np.cumsum(sequences.lengths_B)
    spans = [slice(int(ends_B[i] - sequences.lengths_B[i]), int(ends_B[i])) for i in members]
    packed = pack([sequences.token_ids_N[s] for s in spans], [sequences.trained_N[s] for s in spans])

    def tokens(values_N: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        chosen = [values_N[s][sequences.trained_N[s]] for s in spans]
        flat = np.concatenate(chosen) if chosen else values_N[:0]
        return torch.from_numpy(flat.copy()).to(device, dtype)

    def repeated(values_B: np.ndarray) -> torch.Tensor:
        flat = values_B[members][packed.sequence_T] if len(members) else values_B[:0]
        return torch.from_numpy(flat.copy()).to(device, torch.float32)

    batch = Batch(
        behaviour_T=tokens(sequences.behaviour_N, torch.float32),
        advantages_T=repeated(sequences.advantages_B),
        lags_T=tokens(sequences.lags_N, torch.int64),
        sequence_T=torch.from_numpy(packed.sequence_T).to(device),
        num_sequences=len(members),
        weights_T=repeated(sequences.weights_B),
        rewards_T=repeated(sequences.rewards_B),
    )
    inputs = packed_input(packed, device, kind)
    return MicroBatch(inputs=inputs, batch=batch, num_tokens=int(packed.lengths.sum()) if len(members) else 0)
