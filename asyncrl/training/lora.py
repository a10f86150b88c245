"""Low-rank adapters through peft: put into the model before sharding, merged when weights are published or exported.

Called by model.py. Generators never see an adapter: they receive W + scale * B A under the plain name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"


def add_adapters(lm: PreTrainedModel, config: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Put adapters into the model's linear layers, in place; only they are trained. Equal seeds, equal adapters."""
    import peft

    modules = config.target_modules
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=modules if modules == "all-linear" else modules.split(","),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(adapters, lm)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return lm


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is what it was before any adapter was trained."""
    scalings = [_scaling(module) for module in lm.modules() if hasattr(module, "lora_A")]
    scales = [scaling["default"] for scaling in scalings]
    for scaling in scalings:
        scaling["default"] = 0.0
    try:
        yield
    finally:
        for scaling, scale in zip(scalings, scales, strict=True):
            scaling["default"] = scale


def _scaling(module: nn.Module) -> dict[str, float]:
    """peft's own table: adapter -> alpha / rank."""
    scaling = module.scaling
    assert isinstance(scaling, dict)
    return scaling


def merged(named: dict[str, Tensor], lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights with adapters -> weights under their plain names. Gathers the small A factors on all ranks at once."""
    factors = {name: _whole(tensor) for name, tensor in named.items() if name.endswith(A)}
    for name, tensor in named.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".weight").removesuffix(BASE)
        if stem + A in factors:
            scale = _scaling(lm.get_submodule(stem))["default"]
            tensor = _plus_product(tensor, named[stem + B], factors[stem + A], scale)
        yield name.replace(f"{BASE}.", "."), tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plus_product(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """W + scale * B A, shard by shard: W and B are both sharded over their rows."""
    if not isinstance(weight, DTensor):
        return weight + scale * (b @ a)
    assert isinstance(b, DTensor)
    assert weight.placements == b.placements
    local = weight.to_local() + scale * (b.to_local() @ a.to(b.device))
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
