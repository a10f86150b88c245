"""The reference policy: what the trained one may not drift from. Beside the trainer, frozen, on the same ranks.

Called by member.py when the algorithm asks for it. With adapters and no warm-up the reference is the policy without its
adapters, and costs no memory, unless `services.ref_model.with_gpus` is false, which asks for a copy in host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import Config
from asyncrl.training.batch import MicroBatch
from asyncrl.training.lora import adapters_off
from asyncrl.training.model import Policy, load_policy, reshard
from asyncrl.training.ranks import Ranks
from asyncrl.training.step import Reference


def make_reference(
    config: Config, policy: Policy, ranks: Ranks, mesh: DeviceMesh, *, initial: str, temperature: float
) -> Reference:
    """The policy at `initial` (a model path), frozen. Collective. What cannot work is refused by checks.py."""
    on_host = config.services.ref_model.with_gpus is False
    if config.training.lora.rank and initial == config.model.path and not on_host:
        return _without_adapters(policy, temperature)
    frozen = load_policy(config, ranks, mesh, path=initial, trained=False, offload=on_host)

    @torch.no_grad()
    def reference(micro: MicroBatch) -> Tensor:
        logprobs_T = frozen(micro.inputs, temperature=temperature)[0]
        reshard(frozen)
        return logprobs_T

    return reference


def _without_adapters(policy: Policy, temperature: float) -> Reference:
    @torch.no_grad()
    def reference(micro: MicroBatch) -> Tensor:
        with adapters_off(policy.lm):
            logprobs_T = policy(micro.inputs, temperature=temperature)[0]
        reshard(policy)
        return logprobs_T

    return reference
