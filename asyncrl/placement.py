"""Which process sees which GPU. Pure, apart from `find_gpus`; `launch.py` calls both.

The trainer gets the first GPUs, one per rank, and every rank sees all of them (its LOCAL_RANK picks, as under
torchrun); each generator replica sees its own, and so does each reference process. With too few GPUs they are shared,
and the notes say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace

from asyncrl.config import ServicesConfig
from asyncrl.shared_gpu import BESIDE_OTHERS, BESIDE_TRAINER, MEMORY_SHARE, WITH_GENERATOR

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Environment variables per role, and what a user should know about them."""

    trainer: dict[str, str]
    generators: list[dict[str, str]]
    references: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_gpus() -> list[str]:
    """GPUs of this machine as CUDA_VISIBLE_DEVICES would name them; respects that variable where it is set."""
    if VISIBLE in os.environ:
        return [g for g in os.environ[VISIBLE].split(",") if g.strip() and g != "-1"]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return listing.split()


def place(gpus: list[str], services: ServicesConfig) -> Placement:
    """Assign GPUs. Raises ValueError when a role insists on GPUs that are not there."""
    return _tell_who_shares(_place_references(gpus, services, _place_trainer_and_generators(gpus, services)))


def _place_references(gpus: list[str], services: ServicesConfig, placement: Placement) -> Placement:
    reference = services.ref_model
    if not gpus or reference.with_gpus is False:
        return replace(placement, references=[{VISIBLE: ""}] * reference.num_replicas)
    taken = {gpu for env in (placement.trainer, *placement.generators) for gpu in env[VISIBLE].split(",")}
    left, notes = [gpu for gpu in gpus if gpu not in taken], list(placement.notes)
    if len(left) < reference.num_replicas:
        # The trainer's own: where the reference would be without processes, and a rank computes little while it waits.
        pool = left or [gpu for gpu in placement.trainer[VISIBLE].split(",") if gpu] or gpus
        notes.append(
            f"{reference.num_replicas} GPUs wanted for reference processes, {len(left)} left: GPUs {','.join(pool)} "
            "are shared"
        )
        left = pool
    references = [{VISIBLE: left[i % len(left)]} for i in range(reference.num_replicas)]
    return replace(placement, references=references, notes=notes)


def _tell_who_shares(placement: Placement) -> Placement:
    """Say in each process's environment what sharing a GPU means to it."""
    trainer = [gpu for gpu in placement.trainer[VISIBLE].split(",") if gpu]
    theirs = [[gpu for gpu in env[VISIBLE].split(",") if gpu] for env in placement.generators]
    users = Counter(gpu for gpus in theirs for gpu in gpus)
    references = Counter(env[VISIBLE] for env in placement.references)

    def share(gpu: str) -> float:
        if gpu in trainer:
            return BESIDE_TRAINER / users[gpu]
        return BESIDE_OTHERS / (users[gpu] + references[gpu])

    generators = []
    for env, gpus in zip(placement.generators, theirs, strict=True):
        if any(users[gpu] + references[gpu] > 1 or gpu in trainer for gpu in gpus):
            env = {**env, MEMORY_SHARE: f"{min(map(share, gpus)):.3g}"}
        generators.append(env)
    # NCCL does not connect a GPU with itself: rank 0 with a generator, or one generator with another.
    group = Counter(trainer[:1]) + users
    told = {WITH_GENERATOR: "1"} if trainer and max(group.values()) > 1 else {}
    return replace(placement, trainer={**placement.trainer, **told}, generators=generators)


def _place_trainer_and_generators(gpus: list[str], services: ServicesConfig) -> Placement:
    trainer, generator = services.trainer, services.generator
    for name, service in (("trainer", trainer), ("generator", generator), ("ref_model", services.ref_model)):
        if service.with_gpus and not gpus:
            raise ValueError(
                f"services.{name}.with_gpus is true, but this machine shows no GPU; remove it or set it false"
            )
    none = {VISIBLE: ""}
    if not gpus:
        return Placement(trainer=none, generators=[none] * generator.num_replicas)
    notes: list[str] = []
    rest = list(gpus)
    trainer_env = none
    if trainer.with_gpus is not False:
        if len(gpus) < trainer.procs:
            raise ValueError(
                f"services.trainer.procs {trainer.procs} needs a GPU per rank, and there are {len(gpus)}; lower it, or "
                "set services.trainer.with_gpus false"
            )
        trainer_env, rest = {VISIBLE: ",".join(gpus[: trainer.procs])}, gpus[trainer.procs :]
    if generator.with_gpus is False:
        return Placement(trainer=trainer_env, generators=[none] * generator.num_replicas)
    wanted = generator.num_replicas * generator.procs
    if len(gpus) < generator.procs:
        raise ValueError(f"services.generator.procs {generator.procs} needs that many GPUs, and there are {len(gpus)}")
    if len(rest) < wanted:
        # The last GPUs first: NCCL connects rank 0 with a generator anywhere but on rank 0's own.
        pool = rest if len(rest) >= generator.procs else gpus[::-1]
        notes.append(
            f"{wanted} GPUs wanted for generators, {len(rest)} left by the trainer: GPUs {','.join(pool)} are shared, "
            "and vLLM takes a part of their memory (generation.vllm.gpu_memory_utilization)"
        )
        rest = pool
    slots = max(1, len(rest) // generator.procs)
    chunks = [rest[i * generator.procs : (i + 1) * generator.procs] for i in range(slots)]
    envs = [{VISIBLE: ",".join(chunks[i % slots])} for i in range(generator.num_replicas)]
    return Placement(trainer=trainer_env, generators=envs, notes=notes)
