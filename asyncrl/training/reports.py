"""What one batch of groups and one step look like in figures: rewards, staleness, lengths, speed, memory.

Called by trainer rank 0 once per step. Pure but for the memory counters and the data's size.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
from transformers import PreTrainedConfig

from asyncrl.training.batch import Sequences
from asyncrl.types import Group

log = logging.getLogger(__name__)

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
              "L40S": 362e12, "L4": 121e12, "4090": 165e12}  # fmt: skip
"""Dense bf16 peaks by what the GPU's name contains, from the vendor's data sheets."""


def describe_groups(groups: Sequence[Group]) -> dict[str, float]:
    """reward/*, length/* of all responses of the batch."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = np.array([episode.reward for episode in episodes])
    lengths = np.array([int(episode.loss_mask.sum()) for episode in episodes])
    parts: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.rewards.items():
            parts[name].append(value)
    not_finite = sum(int((episode.loss_mask & ~np.isfinite(episode.logprobs)).sum()) for episode in episodes)
    uniform = [bool((group.rewards_G == group.rewards_G[0]).all()) for group in groups]
    return {
        "reward/mean": float(rewards.mean()),  # the server's, over filtered groups too, takes its place where it knows
        "reward/trained_mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/uniform_groups": float(np.mean(uniform)),
        **{f"reward/{name}": float(np.mean(values)) for name, values in parts.items()},
        "length/mean": float(lengths.mean()),
        "length/p95": float(np.percentile(lengths, 95)),
        "length/max": float(lengths.max()),
        "length/truncated": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
        "bias/trained_length": float(lengths.mean()),
        "tokens/not_finite": float(not_finite),  # sampled with a log-probability that is no number: never trained
    }


def epoch_size(count: Callable[[], int | None]) -> int | None:
    """What `count` says. None, with a warning, where the data is not to be had: a figure is no reason to end a run."""
    try:
        return count()
    except (ValueError, ImportError) as error:
        log.warning("there is no data/epoch in this run: %s", error)
        return None


def describe_sequences(sequences: Sequences) -> dict[str, float]:
    """staleness/* over trained tokens; nothing when there are none."""
    lags = sequences.lags_N[sequences.trained_N]
    if not len(lags):
        return {}
    return {
        "staleness/mean": float(lags.mean()),
        "staleness/max": float(lags.max()),
        "staleness/p95": float(np.percentile(lags, 95)),
    }


def flops(config: PreTrainedConfig, num_parameters: int, lengths: np.ndarray) -> float:
    """Operations of forward and backward over sequences of these lengths: 6 per weight and token, plus attention."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6.0 * config.num_hidden_layers * config.num_attention_heads * width * float((lengths**2).sum())
    embedding = config.vocab_size * config.hidden_size * (0 if config.tie_word_embeddings else 1)
    return 6.0 * (num_parameters - embedding) * float(lengths.sum()) + attention


def peak_flops(device: torch.device) -> float | None:
    """Of this device in bf16; None when we do not know it (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def memory(device: torch.device) -> dict[str, float]:
    """memory/*: of this process, and the GPU's highest since the last call."""
    row = {"memory/rss_bytes": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        row["memory/gpu_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return row
