"""Logits in float32 from vLLM, as the trainer computes them: bf16 operands, fp32 products and sums.

A bf16 logit of 20 is rounded to the nearest eighth, which is most of what trainer and generator disagree about. vLLM
from 0.32 on has a switch for it (`hf_overrides.head_dtype`), which `vllm_args.py` sets; inside older ones, on a GPU,
the worker calls `widen_head`. Never needed where the model itself is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

METHOD = "UnquantizedEmbeddingMethod"


def has_switch() -> bool:
    """Whether this vLLM can be told to compute a generation model's logits in float32."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return hasattr(LogitsProcessor, "_apply_head")


def widen_head(model: torch.nn.Module) -> int:
    """Have the output heads of a loaded vLLM model give float32; returns how many there are.

    Those that are quantised or in float32 already stay as they are. Looking up embeddings does not change.
    """
    widened = 0
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if type(method).__name__ == METHOD and isinstance(weight, Tensor) and weight.dtype != torch.float32:
            method.apply = wide_product
            widened += 1
    return widened


def wide_product(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ layer.weight.T + bias in float32, (..., vocabulary), without a float32 copy of the weight on a GPU."""
    flat = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        logits = torch.mm(flat, layer.weight.t(), out_dtype=torch.float32)
    else:
        logits = flat.float() @ layer.weight.t().float()
    if bias is not None:
        logits += bias.float()
    return logits.reshape(*x.shape[:-1], -1)
