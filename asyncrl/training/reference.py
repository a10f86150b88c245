"""The reference policy: what the trained one may not drift from. Frozen; beside the trainer or in processes of its own.

Called by member.py when the algorithm asks for it. Without `services.ref_model.num_replicas` it is sharded over the
trainer's ranks; with adapters and no warm-up it is then the policy without its adapters, and costs no memory, unless
`services.ref_model.with_gpus` is false, which asks for a copy in host memory. With replicas the ranks hold nothing and
ask (reference_process.py answers).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import Config
from asyncrl.reference.client import ReferenceClient
from asyncrl.reference.messages import Packed
from asyncrl.settings import Run
from asyncrl.training.batch import MicroBatch
from asyncrl.training.lora import adapters_off
from asyncrl.training.model import Policy, load_policy, reshard
from asyncrl.training.ranks import Ranks
from asyncrl.training.step import Reference


def initial_model(run: Run) -> str:
    """The model path of the policy that the run began with: what a warm-up left behind, or model.path.

    The same in the first start and in every resume, on every rank and in every reference process, once a warm-up ended.
    """
    warmed = run.dir / "initial"
    return str(warmed) if warmed.exists() else run.config.model.path


def make_reference(
    config: Config, policy: Policy, ranks: Ranks, mesh: DeviceMesh, *, initial: str, temperature: float
) -> Reference:
    """The policy at `initial` (a model path), frozen. Collective. What cannot work is refused by checks.py."""
    on_host = config.services.ref_model.with_gpus is False
    if config.training.lora.rank and initial == config.model.path and not on_host:
        return _without_adapters(policy, temperature)
    frozen = load_policy(config, ranks, mesh, path=initial, trained=False, offload=on_host)

    @torch.no_grad()
    def reference(micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        logprobs = [frozen(micro.inputs, temperature=temperature)[0] for micro in micros]
        reshard(frozen)
        return iter(logprobs)

    return reference


def _without_adapters(policy: Policy, temperature: float) -> Reference:
    @torch.no_grad()
    def reference(micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        with adapters_off(policy.lm):
            logprobs = [policy(micro.inputs, temperature=temperature)[0] for micro in micros]
        reshard(policy)
        return iter(logprobs)

    return reference


def make_remote_reference(client: ReferenceClient, ranks: Ranks, *, temperature: float) -> Reference:
    """The same through reference processes. Not collective: each rank asks for its own micro-batches.

    The whole batch is asked for at once; each answer is waited for when its micro-batch is about to be trained.
    """

    def reference(micros: Sequence[MicroBatch]) -> Iterator[Tensor]:
        asked = [packed_of(micro) for micro in micros if len(micro.inputs.predictors_T)]
        answers = client.ask(asked, temperature=temperature)
        return (_answer(micro, answers).to(ranks.device) for micro in micros)

    return reference


def _answer(micro: MicroBatch, answers: Iterator[np.ndarray]) -> Tensor:
    """A micro-batch that trains nothing was not asked about."""
    if not len(micro.inputs.predictors_T):
        return torch.empty(0, dtype=torch.float32)
    return torch.from_numpy(next(answers))


def packed_of(micro: MicroBatch) -> Packed:
    """What a reference process needs of a micro-batch: its layout, and which tokens it is asked about."""
    inputs = micro.inputs
    return Packed(
        lengths=np.diff(inputs.layout.cu_seqlens.cpu().numpy()),
        token_ids_S=inputs.input_ids_S.cpu().numpy().astype(np.int32),
        predictors_T=inputs.predictors_T.cpu().numpy().astype(np.int32),
    )
