"""Losses as `nn.Module`s with the call `(logprobs, ref_logprobs, advantages, padding_mask)`, and how to train on one.

`SimpleGRPOLoss` and `ReinforceLoss` are ready-made and work anywhere: padded tensors (B, L) in, a scalar out. A user's
own module of that call becomes an algorithm through `module_algorithm`, which `asyncrl.algorithm.as_algorithm` calls
for a registered class that is a module. A module reduces by itself, so in general its result depends on how a batch is
cut into micro-batches, unlike the per-token losses of `algos/`. Only a plain mean over tokens (`aggregation`
token_mean) or over responses' means (sequence_mean) is put together again exactly.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from asyncrl.algorithm import Algorithm, Needs
from asyncrl.config import ReplayConfig, TrainingConfig
from asyncrl.losses import checks
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.kl import estimate
from asyncrl.losses.tokens import log_ratio
from asyncrl.types import Batch

AVERAGES = ("token_mean", "sequence_mean")
"""Aggregations whose weights sum to 1, so that they average the scalars of micro-batches."""


class SimpleGRPOLoss(nn.Module):
    """GRPO with one optimiser step per batch: -A logp with a k3 penalty to the reference, mean of responses' means."""

    aggregation = "sequence_mean"

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        """logprobs, ref_logprobs (B, L); advantages (B,), (B, 1) or (B, L); padding_mask (B, L), 1 for real tokens."""
        logprobs, ref_logprobs = _masked(logprobs, padding_mask), _masked(ref_logprobs, padding_mask)
        policy = (logprobs - logprobs.detach()).exp() * _columns(advantages)
        loss = self.beta * estimate("k3", logprobs, ref_logprobs) - policy
        return masked_mean(loss, padding_mask, dim=1).mean()


class ReinforceLoss(nn.Module):
    """REINFORCE times the detached ratio to `ref_logprobs` (of the policy that sampled) within 1 +- clip_ratio."""

    aggregation = "token_mean"

    def __init__(self, clip_ratio: float = 0.2) -> None:
        super().__init__()
        self.clip_ratio = clip_ratio

    def forward(self, logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, padding_mask: Tensor) -> Tensor:
        """logprobs, ref_logprobs (B, L); advantages (B,), (B, 1) or (B, L); padding_mask (B, L), 1 for real tokens."""
        logprobs, ref_logprobs = _masked(logprobs, padding_mask), _masked(ref_logprobs, padding_mask)
        ratio = log_ratio(logprobs.detach(), ref_logprobs).exp().clamp(1.0 - self.clip_ratio, 1.0 + self.clip_ratio)
        return masked_mean(-ratio * _columns(advantages) * logprobs, padding_mask)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the tokens whose mask is set; 0, with a gradient of 0, when there is none. Masked NaN stays out."""
    return _masked(values, mask).sum(dim) / mask.bool().sum(dim).clamp(min=1)


@cache
def module_algorithm(cls: type[nn.Module]) -> type[Algorithm]:
    """An algorithm whose loss is the module `cls`; the parameters of its `__init__` become the algorithm's keys.

    `ref_logprobs` are the reference policy's when the key `beta` is above 0, otherwise those recorded at sampling. A
    class attribute `aggregation` names how micro-batches are averaged; the module's own parameters are not trained.
    """
    fields = _init_fields(cls)
    names = [name for name, _, _ in fields]
    aggregation = getattr(cls, "aggregation", "token_mean")

    def loss(self: Any, logprobs_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return module_loss(cls(**{name: getattr(self, name) for name in names}), logprobs_T, batch)

    def needs(self: Any) -> Needs:
        return Needs(reference=self.beta > 0)

    def check(self: Any, *, training: TrainingConfig, replay: ReplayConfig) -> None:
        checks.check(self, training=training, replay=replay)
        if self.aggregation not in AVERAGES:
            raise ValueError(f"a loss module returns a mean: algo.aggregation must be one of {', '.join(AVERAGES)}")

    methods = {"loss": loss, "needs": needs, "check": check, "__doc__": cls.__doc__}
    fields.append(("aggregation", Aggregation, aggregation))
    made = msgspec.defstruct(
        cls.__name__, fields, bases=(Algorithm,), namespace=methods, kw_only=True, module=cls.__module__
    )
    assert issubclass(made, Algorithm)
    return made


def module_loss(module: nn.Module, logprobs_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a padded module on a packed batch; its scalar at every token, so that weights that sum to 1 average it."""
    reference_T = batch.behaviour_T if batch.reference_T is None else batch.reference_T
    rows_T, columns_T = batch.sequence_T, _positions(batch)
    shape = (batch.num_sequences, int(columns_T.max()) + 1 if len(columns_T) else 1)

    def pad(values_T: Tensor) -> Tensor:
        return values_T.new_zeros(shape).index_put((rows_T, columns_T), values_T)

    mask = pad(torch.ones_like(batch.behaviour_T))
    scalar = module(pad(logprobs_T), pad(reference_T), pad(batch.advantages_T), mask)
    if scalar.ndim:
        raise ValueError(f"{type(module).__name__} must return a scalar loss, got shape {tuple(scalar.shape)}")
    return scalar.expand(logprobs_T.shape), {}


def _positions(batch: Batch) -> Tensor:
    """Each token's index within its response."""
    counts_B = torch.bincount(batch.sequence_T, minlength=batch.num_sequences)
    starts_B = counts_B.cumsum(0) - counts_B
    return torch.arange(len(batch.sequence_T), device=batch.sequence_T.device) - starts_B[batch.sequence_T]


def _init_fields(cls: type[nn.Module]) -> list[tuple[str, Any, Any]]:
    """The parameters of `__init__` as Struct fields; each needs a default, since an algorithm runs by name alone."""
    fields = []
    for p in list(inspect.signature(cls.__init__, eval_str=True).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):  # nn.Module's own __init__ has nothing else
            continue
        if p.default is p.empty:
            raise ValueError(
                f"{cls.__name__}.__init__: parameter {p.name!r} needs a default to be a key of the algorithm"
            )
        fields.append((p.name, type(p.default) if p.annotation is p.empty else p.annotation, p.default))
    return fields


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is not set, before anything takes an exp."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def _columns(advantages: Tensor) -> Tensor:
    return advantages[:, None] if advantages.ndim == 1 else advantages
