"""The policy: any Hugging Face causal LM, sharded over the ranks, giving log-probabilities of chosen tokens.

Called by trainer.py, sft.py and reference.py. Built on meta, filled one transformer block at a time from rank 0 and
sharded at once, so that no rank but the first ever holds the whole model. It computes no loss and never holds all
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config import Config
from asyncrl.models import build_model
from asyncrl.training import attention, lora
from asyncrl.training.attention import Kind, PackedInput
from asyncrl.training.logprobs import chosen_logprobs
from asyncrl.training.ranks import Ranks
from asyncrl.weights.gather import in_sending_order

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = {"sdpa": attention.sdpa, "flash": attention.flash, "flex": attention.flex}
REGISTERED = {"sdpa": "asyncrl_rows", "flash": "asyncrl_varlen", "flex": "asyncrl_blocks"}
"""Names in transformers: one that contains "flash" makes it look for a kernel package of its own."""
LOGIT_CHANGERS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration keys of models whose logits are not simply the output layer's."""


class Policy(nn.Module):
    """A causal LM as the trainer sees it. The output layer runs inside FSDP's forward, where its weight is whole."""

    def __init__(self, lm: PreTrainedModel, *, kind: Kind) -> None:
        super().__init__()
        self.lm = lm
        self.kind = kind
        """Which of ATTENTION it uses."""

    def forward(
        self, packed: PackedInput, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """One packed micro-batch -> log-probabilities of its trained tokens, fp32 (T,), and their entropy, if asked."""
        hidden = self.lm.base_model(
            input_ids=packed.input_ids_S[None],
            position_ids=packed.positions_S[None],
            use_cache=False,
            layout=packed.layout,
        ).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        return chosen_logprobs(
            hidden[packed.predictors_T],
            head.weight,
            packed.targets_T,
            bias_V=head.bias,
            temperature=temperature,
            entropy=entropy,
        )


def load_policy(
    config: Config,
    ranks: Ranks,
    mesh: DeviceMesh,
    *,
    path: str | None = None,
    trained: bool = True,
    offload: bool = False,
) -> Policy:
    """The model at `path` (default: model.path) on this rank's shard. Collective over all ranks.

    `trained=False` is for a frozen copy: no gradients, compute type only; `offload` keeps it in host memory whatever
    training.cpu_offload says. Raises ValueError for what cannot work.
    """
    training, path = config.training, path or config.model.path
    compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[training.dtype]
    master = torch.float32 if trained else compute
    source = build_model(path, dtype=master, seed=config.seed) if ranks.is_first else None
    lm = build_model(path, dtype=master, device="meta", weights=False)
    kind = choose_attention(config.model.attention, lm.config, compute, ranks.device)
    if trained and training.lora.rank:
        source = lora.add_adapters(source, training.lora, seed=config.seed) if source is not None else None
        lm = lora.add_adapters(lm, training.lora, seed=config.seed)
    _prepare(lm, kind, checkpointing=trained and training.activation_checkpointing)
    if not trained:
        lm.requires_grad_(False)
    policy = Policy(lm, kind=kind)
    to_host = (offload or training.cpu_offload) and ranks.device.type == "cuda"
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block, original in _parts(policy, source):
        _fill(block, original, ranks)
        if block is policy:
            lm.tie_weights()
        elif training.compile:
            block.compile()
        fully_shard(
            block, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy() if to_host else OffloadPolicy()
        )
    for module in policy.modules():  # not recursive in torch: each block has its own factor
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy.train()


def choose_attention(
    wanted: Kind | Literal["auto"], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Kind:
    """Which attention to use. Raises ValueError for models whose layers let information cross sequence boundaries."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := layers - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{config.model_type} has {', '.join(sorted(unknown))} layers, which would leak between packed sequences; "
            "use a model with full or sliding-window attention"
        )
    for key in LOGIT_CHANGERS:
        if getattr(config, key, None) not in (None, 1.0):
            raise ValueError(
                f"{config.model_type} changes its logits after the output layer ({key}), which is not supported"
            )
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"{config.model_type} caps attention logits, which packed attention does not support")
    half = device.type == "cuda" and dtype == torch.bfloat16
    if wanted == "auto":
        return "flash" if half and torch.cuda.get_device_capability(device)[0] >= 8 else "sdpa"
    if wanted == "flash" and not half:
        raise ValueError("model.attention flash needs a GPU and training.dtype bfloat16; use sdpa")
    if wanted == "flex" and device.type != "cuda":
        raise ValueError("model.attention flex needs a GPU: torch has no backward pass of it on CPUs; use sdpa")
    if wanted == "flex" and "sliding_attention" in layers:
        raise ValueError(
            f"model.attention flex has no sliding window, which {config.model_type} uses; use flash or sdpa"
        )
    return wanted


def _prepare(lm: PreTrainedModel, kind: Kind, *, checkpointing: bool) -> None:
    """Packed attention, no dropout (the sampler had none), and recomputation when asked."""
    from transformers import AttentionInterface

    name = REGISTERED[kind]
    AttentionInterface.register(name, ATTENTION[kind])
    lm.set_attn_implementation(name)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _parts(policy: Policy, source: PreTrainedModel | None) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Each transformer block, then the whole, beside its original on rank 0."""
    blocks = set(policy.lm._no_split_modules or ())
    found = {name: module for name, module in policy.lm.named_modules() if type(module).__name__ in blocks}
    if not found:
        raise ValueError(f"{policy.lm.config.model_type} does not say which of its modules are transformer blocks")
    originals = dict(source.named_modules()) if source is not None else {}
    for name, module in found.items():
        yield module, originals.get(name)
    yield policy, Policy(source, kind=policy.kind) if source is not None else None


def _fill(part: nn.Module, original: nn.Module | None, ranks: Ranks) -> None:
    """Give every tensor on meta in `part` memory on this rank's device and rank 0's value. Buffers included."""
    originals = dict(original.named_modules(remove_duplicate=False)) if original is not None else {}
    for name, module in part.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        if not any(tensor.is_meta for tensor in own.values()):
            continue
        module.to_empty(device=ranks.device, recurse=False)
        theirs = originals.get(name)
        for key in own:
            tensor = getattr(module, key).data
            if theirs is not None:
                tensor.copy_(getattr(theirs, key).data)
            if ranks.size > 1:
                dist.broadcast(tensor, src=0)


def published(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, in the order in which they are sent, as DTensor shards in `dtype`;
    adapters are merged.

    Tied weights appear once, under the name of the input embedding. Collective over ranks when there are adapters.
    """
    reshard(policy)
    named = ((name.removeprefix("lm."), parameter.detach()) for name, parameter in policy.named_parameters())
    for name, tensor in lora.merged(dict(in_sending_order(named)), policy.lm):
        yield name, tensor.to(dtype)


def reshard(policy: Policy) -> None:
    """Free whole parameters that a forward without a backward left behind, so that none goes stale."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def expect_backward(policy: Policy, *, last: bool) -> None:
    """Tell FSDP whether the next backward pass is the last before the optimiser's step."""
    assert isinstance(policy, FSDPModule)
    policy.set_is_last_backward(last)


def num_parameters(policy: Policy) -> int:
    """Parameters of the whole model, over all ranks."""
    return sum(parameter.numel() for parameter in policy.parameters())
