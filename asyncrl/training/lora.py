"""Low-rank adapters through peft: put into the model before sharding, merged when weights are published or exported,
and written as peft writes them.

Called by model.py and export.py. Generators never see an adapter: they receive W + scale * B A under the plain name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config import LoraConfig

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig
    from transformers import PreTrainedModel

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"


def add_adapters(lm: PreTrainedModel, config: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Put adapters into the model's linear layers, in place; only they are trained. Equal seeds, equal adapters."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(config), lm)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return lm


def peft_config(config: LoraConfig, *, modules: Sequence[str] = (), base: str | None = None) -> PeftConfig:
    """The configuration as peft has it; `modules` in place of `all-linear`, `base`: the model it belongs on."""
    from peft import LoraConfig as PeftConfig

    chosen = config.target_modules
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=chosen.split(",") if chosen != "all-linear" else list(modules) or chosen,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=base is not None,
    )


def is_factor(name: str) -> bool:
    """Whether a parameter is half of an adapter."""
    return name.endswith((A, B))


def peft_name(name: str) -> str:
    """A factor's name in a file of peft's."""
    return f"base_model.model.{name.replace('.default.', '.')}"


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
    factors = {name: whole(tensor) for name, tensor in named.items() if name.endswith(A)}
    for name, tensor in named.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".weight").removesuffix(BASE)
        if stem + A in factors:
            scale = _scaling(lm.get_submodule(stem))["default"]
            tensor = _plus_product(tensor, named[stem + B], factors[stem + A], scale)
        yield name.replace(f"{BASE}.", "."), tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; collective where it is sharded."""
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
