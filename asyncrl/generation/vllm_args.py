"""Configuration -> vLLM engine arguments: what we set, what the user may set, and what is refused by name.

`vllm.py` calls this once at start. It reads vLLM's list of arguments, so a new vLLM's arguments are known without a
change here. It never starts anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from asyncrl.generation.vllm_logits import has_switch
from asyncrl.models import TINY, save_tiny
from asyncrl.shared_gpu import memory_share

if TYPE_CHECKING:
    from asyncrl.config import Config

RECEIVER = "asyncrl.generation.vllm_worker.Receiver"

MANAGED = {
    "model": "set model.path",
    "tokenizer": "set model.path",
    "tensor_parallel_size": "set services.generator.procs",
    "pipeline_parallel_size": "set services.generator.procs: a generator's processes are tensor-parallel",
    "data_parallel_size": "set services.generator.num_replicas",
    "seed": "set seed",
    "skip_tokenizer_init": "token ids go in and come out, so vLLM needs no tokenizer",
    "worker_extension_cls": "asyncrl's own receives the weights",
    "logprobs_mode": "losses need the log-probabilities of the distribution that was sampled from",
    "load_format": "weights come from the trainer",
}
"""Arguments that asyncrl owns, with what to do instead."""


def engine_arguments(config: Config, *, index: int, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs for generator `index`. Raises ValueError on a refused one."""
    # A value from the command line is text, and vLLM's types are not known here: YAML's reading of it is.
    given = config.generation.vllm.items()
    chosen = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in given}
    check_arguments(chosen)
    dtype = config.generation.dtype
    defaults: dict[str, Any] = {
        "dtype": ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype,
        "max_num_seqs": config.generation.max_concurrency,
        "max_model_len": max_model_len(config),
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # not the folder's: its sampling defaults and stop tokens are not ours
        "stream_interval": 8,
        "disable_log_stats": True,
    }
    if not on_gpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    elif (share := memory_share()) is not None:
        defaults |= {"gpu_memory_utilization": share}
    ours = {
        "model": model_folder(config, index=index),
        "tensor_parallel_size": config.services.generator.procs,
        "seed": config.seed + index,  # replicas must not sample the same tokens
        "skip_tokenizer_init": True,
        "worker_extension_cls": RECEIVER,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",  # version 0 comes from the trainer
    }
    if wide_head(config, chosen) and has_switch():
        overrides = chosen.get("hf_overrides") or {}
        if isinstance(overrides, dict):
            chosen["hf_overrides"] = {"head_dtype": "float32", **overrides}
    return {**defaults, **chosen, **ours}


def wide_head(config: Config, chosen: Mapping[str, Any]) -> bool:
    """Whether vLLM shall compute logits in float32."""
    return config.generation.fp32_lm_head and chosen.get("quantization") is None


def check_arguments(chosen: dict[str, Any]) -> None:
    """Refuse unknown arguments (with the nearest known one) and those that asyncrl owns."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in chosen:
        if name in MANAGED:
            raise ValueError(f"generation.vllm.{name} cannot be set: {MANAGED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"generation.vllm.{name} is no engine argument of vLLM {vllm.__version__}{hint}")


def max_model_len(config: Config) -> int:
    """Longest prompt plus response: what is trained, within what the model can."""
    from asyncrl.models import load_config

    limit = getattr(load_config(config.model.path), "max_position_embeddings", None)
    return min(config.training.seq_len, limit or config.training.seq_len)


def model_folder(config: Config, *, index: int) -> str:
    """What vLLM calls the model: a folder or hub name. `tiny` is written into the run folder first."""
    if config.model.path != TINY:
        return config.model.path
    if config.run_dir is None:
        raise ValueError("model.path tiny under vLLM needs run_dir: vLLM reads models from folders")
    return str(save_tiny(Path(config.run_dir) / "vllm" / f"tiny-{index}", seed=config.seed))


def prepare_environment(*, on_gpu: bool) -> None:
    """Switches that vLLM and its child processes read from the environment; what the user exported wins."""
    from importlib.util import find_spec

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads: a fork could deadlock
    if find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not on_gpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling vLLM's samplers takes longer than it saves here
