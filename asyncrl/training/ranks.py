"""The trainer's ranks as one object: who I am, where I compute, and how small things pass between ranks.

Made once per process by trainer.py and sft.py. Commands and batches travel as bytes over a gloo group of their own, so
that they never mix with FSDP's collectives, and nothing is pickled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config import ParallelismConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class Ranks:
    """The world as one rank sees it. `control` is a gloo group over all ranks."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, data: bytes | None) -> bytes:
        """Bytes of rank 0 -> all ranks; what others pass is ignored. Waits for rank 0, bounded by the timeout."""
        data = data if self.is_first else None
        if self.size == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self.control)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if data is not None and data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if int(size):
            dist.broadcast(payload, src=0, group=self.control)
        return data if data is not None else payload.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes of every rank, in order of rank, on every rank."""
        if self.size == 1:
            return [data]
        own = torch.tensor([len(data)], dtype=torch.int64)
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(sizes, own, group=self.control)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.control)
        return [row.numpy().tobytes()[: int(size)] for row, size in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)


def place_of_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process, by its environment; known before the ranks have joined."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def join_ranks(*, with_gpus: bool | None, timeout_s: float) -> Ranks:
    """Enter the default process group described by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Without those variables this process is the only rank. `timeout_s` bounds every collective. Raises ValueError when
    GPUs are asked for and there are none.
    """
    cuda = torch.cuda.is_available() if with_gpus is None else with_gpus
    if cuda and not torch.cuda.is_available():
        raise ValueError(
            "services.trainer.with_gpus is true, but torch sees no GPU; set it to false or install CUDA torch"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    return _join(device, alone="RANK" not in os.environ, timeout_s=timeout_s)


def join_alone(*, with_gpus: bool) -> Ranks:
    """A world of this process alone, on its first GPU if it may and there is one, whatever the environment says."""
    cuda = with_gpus and torch.cuda.is_available()
    return _join(torch.device("cuda", 0) if cuda else torch.device("cpu"), alone=True, timeout_s=60.0)


def _join(device: torch.device, *, alone: bool, timeout_s: float) -> Ranks:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), device=device, control=control)


def leave_ranks() -> None:
    """Leave the default process group; safe when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(config: ParallelismConfig, ranks: Ranks) -> DeviceMesh:
    """The mesh that FSDP shards over: (shard,) or (replicate, shard). Raises ValueError when the degrees do not fit."""
    for key in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(config, key) != 1:
            raise ValueError(
                f"parallelism.{key} = {getattr(config, key)}: the trainer shards with FSDP alone; set it to 1 "
                "(generators may still use tensor parallelism)"
            )
    replicate = config.data_parallel_replicate_degree
    shard = config.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, ranks.size // replicate)
    if replicate * shard != ranks.size:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} must be the "
            f"number of trainer ranks, {ranks.size}; set the shard degree to -1 to use all"
        )
    if replicate == 1:
        return init_device_mesh(ranks.device.type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(ranks.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
