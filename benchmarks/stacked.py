"""Many small transformers trained side by side: every parameter has a leading dimension of models.

Used by `staleness.py`, which needs thousands of runs of a 57 thousand parameter policy: one batched matrix product
serves all of them, and a sum of their losses gives each its own gradient. Causal, learned positions, RMSNorm before
each block, a GELU MLP of four times the width. Never reads a config, knows no reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer so far, (M, B, heads, S, head width)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one policy."""

    vocab: int
    outputs: int
    positions: int
    width: int = 48
    layers: int = 2
    heads: int = 4


def init_parameters(shape: Shape, seeds: list[int], device: str) -> dict[str, Tensor]:
    """Initial weights, (M, ...) each; models of one seed start alike, whatever else is in the stack."""
    by_seed = {seed: _init_one(shape, seed) for seed in set(seeds)}
    names = by_seed[seeds[0]]
    return {name: torch.stack([by_seed[s][name] for s in seeds]).to(device).requires_grad_() for name in names}


def _init_one(shape: Shape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = shape.width

    def normal(*size: int, std: float = 0.02) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    parameters = {"embed": normal(shape.vocab, width, std=0.5), "position": normal(shape.positions, width, std=0.5)}
    for i in range(shape.layers):
        parameters |= {
            f"{i}.norm1": torch.ones(width),
            f"{i}.qkv": normal(width, 3 * width, std=width**-0.5),
            f"{i}.out": normal(width, width, std=(2 * shape.layers * width) ** -0.5),
            f"{i}.norm2": torch.ones(width),
            f"{i}.up": normal(width, 4 * width, std=width**-0.5),
            f"{i}.down": normal(4 * width, width, std=(8 * shape.layers * width) ** -0.5),
        }
    return parameters | {"norm": torch.ones(width), "head": normal(width, shape.outputs, std=0.02)}


def forward(
    parameters: dict[str, Tensor], shape: Shape, tokens: Tensor, *, cache: Cache | None = None, last: int = 1
) -> tuple[Tensor, Cache]:
    """Tokens (M, B, S), continuing `cache` if given -> logits of the last positions (M, B, last, V), new cache."""
    start = cache[0][0].shape[3] if cache else 0
    positions = parameters["position"][:, None, start : start + tokens.shape[2]]
    one_hot = functional.one_hot(tokens, shape.vocab).to(positions.dtype)
    x = _linear(one_hot, parameters["embed"]) + positions
    grown: Cache = []
    for i in range(shape.layers):
        x, kept = _attend(parameters, shape, i, x, cache[i] if cache else None)
        grown.append(kept)
        hidden = _linear(_norm(x, parameters[f"{i}.norm2"]), parameters[f"{i}.up"])
        x = x + _linear(functional.gelu(hidden), parameters[f"{i}.down"])
    return _linear(_norm(x[:, :, -last:], parameters["norm"]), parameters["head"]), grown


def _attend(
    parameters: dict[str, Tensor], shape: Shape, i: int, x: Tensor, past: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    models, rows, length, width = x.shape
    qkv = _linear(_norm(x, parameters[f"{i}.norm1"]), parameters[f"{i}.qkv"])
    q, k, v = qkv.view(models, rows, length, 3, shape.heads, -1).permute(3, 0, 1, 4, 2, 5)
    if past is not None:
        k, v = torch.cat([past[0], k], dim=3), torch.cat([past[1], v], dim=3)
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // shape.heads)
    hidden = torch.ones(length, k.shape[3], dtype=torch.bool, device=x.device).triu(k.shape[3] - length + 1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return x + _linear(mixed.transpose(2, 3).reshape(x.shape), parameters[f"{i}.out"]), (k, v)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """(M, B, S, in) x (M, in, out) -> (M, B, S, out)."""
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return torch.bmm(flat, weight).view(*x.shape[:-1], weight.shape[-1])


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain[:, None, None]


class StackedAdam:
    """Adam with a learning rate and a gradient norm bound of each model's own."""

    def __init__(self, parameters: dict[str, Tensor], *, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.parameters = list(parameters.values())
        self.betas = betas
        self.steps = 0
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, lr_M: Tensor, *, max_norm: float) -> None:
        """Clip each model's gradient to `max_norm`, update, and clear the gradients. lr_M: (M,)."""
        self.steps += 1
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        assert len(gradients) == len(self.parameters), "every parameter takes part in the loss"
        norm_M = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()
        scale_M = (max_norm / norm_M.clamp(min=1e-12)).clamp(max=1.0)
        correction = (1 - self.betas[0] ** self.steps, 1 - self.betas[1] ** self.steps)
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            shape = (-1, *[1] * (p.ndim - 1))
            g.mul_(scale_M.view(shape))
            m.lerp_(g, 1 - self.betas[0])
            v.lerp_(g.square_(), 1 - self.betas[1])
            p.sub_(m / correction[0] / ((v / correction[1]).sqrt_() + 1e-8) * lr_M.view(shape))
            p.grad = None
