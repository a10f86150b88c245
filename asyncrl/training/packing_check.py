"""A look at the start of a run: does this model, packed, give what it gives unpacked?

Called by member.py on every rank, once. A model that does not hand keyword arguments down to its attention, or mixes
tokens by something else than attention, would train on silently wrong log-probabilities; it is refused here.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.training.attention import packed_input
from asyncrl.training.model import Policy, reshard
from asyncrl.training.packing import pack
from asyncrl.training.ranks import Ranks

LENGTHS = (48, 16)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Mean difference of a log-probability: numerical noise of a batch's shape is well below, a leak well above."""


@torch.no_grad()
def check_packing(policy: Policy, ranks: Ranks, *, dtype: torch.dtype) -> None:
    """Compare a sequence alone with the same behind another. Collective. Raises ValueError when they differ."""
    vocabulary = policy.lm.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, vocabulary, n) for n in LENGTHS)
    alone, behind = _logprobs(policy, ranks, [second]), _logprobs(policy, ranks, [first, second])
    difference = float((alone - behind[-len(alone) :]).abs().mean())
    if not difference <= TOLERANCE[dtype]:
        raise ValueError(
            f"{policy.lm.config.model_type}: packing a sequence behind another changes its log-probabilities by "
            f"{difference:.3g} on average, so tokens see across the boundary; this model cannot be trained packed"
        )


def _logprobs(policy: Policy, ranks: Ranks, sequences: list[np.ndarray]) -> torch.Tensor:
    packed = pack(sequences, [np.arange(len(ids)) > 0 for ids in sequences])
    logprobs_T, _ = policy(packed_input(packed, ranks.device, policy.kind))
    reshard(policy)
    return logprobs_T
