"""AdamW over sharded parameters, the learning rate as a function of the step, and clipping that really clips.

Called by step.py and sft.py. The schedule has no state: the rate of step k depends on k and the configuration alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config import TrainingConfig


def make_optimizer(policy: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; decay on matrices alone."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        fused=trained[0].is_cuda,
    )


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of `step`, counted from 1: a linear rise over warmup_steps, then the schedule, 0 after the last."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    progress = min(max(progress, 0.0), 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate


def apply_gradients(
    policy: nn.Module, optimizer: torch.optim.Optimizer, *, rate: float, max_norm: float
) -> tuple[float, bool]:
    """Clip by the global norm, step and clear; returns the norm before clipping and whether the step was taken.

    A norm that is not finite takes no step: the weights and the optimiser's moments stay as they are. All ranks see
    the same norm, so they agree. `max_norm` 0 never clips.
    """
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    norm = _whole(torch.nn.utils.get_total_norm(gradients, foreach=True))
    finite = bool(norm.isfinite())
    if finite:
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(policy.parameters()), max_norm, norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), finite


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
