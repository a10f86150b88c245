"""What is refused at start-up: settings that would hang, learn nothing, or learn the wrong thing. One line each, with
the remedy. `settings.check` is this `check`; the launcher and `--dry-run` call it before anything starts.

What only one algorithm knows (corrections, its own keys) is refused by that algorithm's `check`, which is called here.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncrl.env import has_demonstrations
from asyncrl.model_check import check_model

if TYPE_CHECKING:
    from asyncrl.settings import Run

TRACKERS = ("console", "jsonl", "wandb", "tensorboard")
MAX_REFERENCES = 32
"""The replay server keeps the address of each (replay/service.py, MAX_ANNOUNCED)."""


def check(run: Run, *, supervised: bool = False) -> None:
    """Raise ValueError for the first thing in `run` that cannot work. `supervised`: it is a run of `asyncrl sft`."""
    for refuse in (
        _lag,
        _capacity,
        _batch,
        _lengths,
        _proximal,
        _processes,
        _reference,
        _sampling,
        _addresses,
        _trackers,
        _warm_up,
        _model,
    ):
        refuse(run)
    run.algo.check(training=run.config.training, replay=run.config.replay)
    try:
        if (supervised or run.config.training.warmup_sft_steps) and next(run.env.demonstrations(), None) is None:
            raise ValueError(f"environment {run.config.env['name']!r} yields no demonstrations")
        if not supervised:
            run.env.check()
    except NotImplementedError as error:
        raise ValueError(str(error)) from None


def _lag(run: Run) -> None:
    replay, training = run.config.replay, run.config.training
    lag = replay.target_lag
    if replay.reuse > lag + 1:
        raise ValueError(
            f"replay.reuse {replay.reuse} > target_lag + 1 = {lag + 1} would deadlock: no lease is granted until more "
            f"is trained; raise replay.target_lag to {replay.reuse - 1} or lower replay.reuse"
        )
    if training.sync_interval > lag + 1:
        raise ValueError(
            f"training.sync_interval {training.sync_interval} > target_lag + 1 = {lag + 1} would deadlock: generators "
            f"wait for a version that is never published; raise replay.target_lag to {training.sync_interval - 1} or "
            "publish more often"
        )
    if replay.reuse + training.sync_interval > lag + 2:
        raise ValueError(
            f"replay.reuse {replay.reuse} with training.sync_interval {training.sync_interval} would deadlock: they "
            f"need replay.target_lag {replay.reuse + training.sync_interval - 2}, got {lag}"
        )
    assert replay.max_lag is not None, "resolve() sets it"
    least = lag + replay.reuse - -(-replay.reuse // max(1, training.batch_size))  # proved in replay/limiter.py
    if replay.max_lag < least:
        raise ValueError(
            f"replay.max_lag {replay.max_lag} cannot be held with target_lag {lag} and reuse {replay.reuse}; "
            f"raise max_lag to at least {least}"
        )


def _capacity(run: Run) -> None:
    capacity, batch = run.config.replay.capacity_groups, run.config.training.batch_size
    assert capacity is not None, "resolve() sets it"
    if capacity < batch:
        raise ValueError(
            f"replay.capacity_groups {capacity} cannot hold one batch of {batch} groups, so no step could ever start; "
            f"raise it to at least {batch}"
        )


def _batch(run: Run) -> None:
    training = run.config.training
    if training.batch_size % training.minibatches:
        raise ValueError(
            f"training.batch_size {training.batch_size} is not divisible by training.minibatches {training.minibatches}"
            "; choose a divisor"
        )
    if run.algo.n_samples < 1:
        raise ValueError(f"algo.n_samples must be at least 1, got {run.algo.n_samples}")
    if run.algo.temperature <= 0:
        raise ValueError(
            f"algo.temperature must be positive, got {run.algo.temperature}: greedy samples have no "
            "log-probability to train"
        )


def _lengths(run: Run) -> None:
    max_tokens, seq_len = run.config.generation.max_tokens, run.config.training.seq_len
    if max_tokens >= seq_len:
        raise ValueError(
            f"generation.max_tokens {max_tokens} leaves no room for a prompt in training.seq_len {seq_len}; "
            "lower the first or raise the second"
        )
    budget = run.config.training.tokens_per_micro_batch
    if budget < seq_len:
        raise ValueError(
            f"training.tokens_per_micro_batch {budget} is below training.seq_len {seq_len}: the longest sequence would "
            f"fit in no micro-batch; raise it to at least {seq_len}"
        )


def _model(run: Run) -> None:
    check_model(run.config.model.path)


def _warm_up(run: Run) -> None:
    steps = run.config.training.warmup_sft_steps
    if steps and not has_demonstrations(run.env):
        raise ValueError(
            f"training.warmup_sft_steps is {steps}, and environment {run.config.env['name']!r} has no demonstrations: "
            "set it to 0, or give the class demonstrations()"
        )


def _proximal(run: Run) -> None:
    if run.algo.needs().proximal and run.config.training.minibatches == 1:
        raise ValueError(
            f"{run.config.algo['name']} recomputes a proximal policy, but training.minibatches is 1: its ratio is "
            "always 1 and its clip never acts; set training.minibatches to 2 or more, or choose an algorithm anchored "
            "on the behaviour policy"
        )


def _processes(run: Run) -> None:
    services, parallel = run.config.services, run.config.parallelism
    if services.generator.num_replicas < 1:
        raise ValueError("services.generator.num_replicas must be at least 1: nothing would generate")
    if services.trainer.num_replicas != 1:
        raise ValueError("services.trainer.num_replicas must be 1; services.trainer.procs sets the number of ranks")
    if parallel.pipeline_parallel_degree != 1:
        raise ValueError(
            "parallelism.pipeline_parallel_degree must be 1: pipeline stages are not supported; shard instead"
        )
    fixed = parallel.tensor_parallel_degree * parallel.data_parallel_replicate_degree
    shard, procs = parallel.data_parallel_shard_degree, services.trainer.procs
    if (shard == -1 and procs % fixed) or (shard != -1 and shard * fixed != procs):
        raise ValueError(
            f"parallelism degrees (tensor {parallel.tensor_parallel_degree} x replicate "
            f"{parallel.data_parallel_replicate_degree} x shard {shard}) do not make services.trainer.procs {procs}; "
            "set data_parallel_shard_degree to -1 or make the product equal"
        )


def _reference(run: Run) -> None:
    services = run.config.services
    reference = services.ref_model
    if reference.procs != 1:
        raise ValueError(
            f"services.ref_model.procs {reference.procs}: a reference process holds the whole model; remove the key, "
            "which shards it over the trainer's ranks, or set services.ref_model.num_replicas for several whole copies"
        )
    if reference.num_replicas > MAX_REFERENCES:
        raise ValueError(
            f"services.ref_model.num_replicas {reference.num_replicas} is more than {MAX_REFERENCES}: lower it"
        )
    if reference.num_replicas == 0 and reference.with_gpus and services.trainer.with_gpus is False:
        raise ValueError(
            "services.ref_model.with_gpus is true and services.trainer.with_gpus false, but the reference policy runs "
            "on the trainer's devices; remove one of them, or set services.ref_model.num_replicas"
        )


def _sampling(run: Run) -> None:
    generation = run.config.generation
    if str(generation.vllm.get("logprobs_mode", "")).startswith("raw"):
        raise ValueError(
            "generation.vllm.logprobs_mode raw_* records log-probabilities before temperature, which is not the policy "
            "that sampled; remove the key"
        )
    if generation.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError("generation.engine is vllm, which is not installed: `make vllm`, or set it to local")
    if generation.engine != "vllm" and generation.vllm and importlib.util.find_spec("vllm") is None:
        raise ValueError(f"generation.vllm.{next(iter(generation.vllm))} has no effect: this run uses the local engine")


def _addresses(run: Run) -> None:
    config = run.config
    for key, address in (
        ("replay.bind", config.replay.bind),
        ("weights.bind", config.weights.bind),
        ("services.ref_model.bind", config.services.ref_model.bind),
    ):
        if not address.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{key}: expected tcp://HOST:PORT (* for any port) or ipc://FILE, got {address!r}")
        host = urlsplit(address.replace("*", "0")).hostname or ""
        loopback = host in {"localhost", "::1"} or host.startswith("127.") or not address.startswith("tcp://")
        if not loopback and run.config.replay.keys is None:
            raise ValueError(
                f"{key} {address} is reachable from other machines and needs keys: `asyncrl keys new FOLDER`, then "
                "replay.keys FOLDER"
            )


def _trackers(run: Run) -> None:
    for name in run.config.metrics.trackers:
        if name not in TRACKERS:
            raise ValueError(f"metrics.trackers: there is no tracker {name!r} (known: {', '.join(TRACKERS)})")
        if name in ("wandb", "tensorboard") and not _installed(name):
            raise ValueError(f"metrics.trackers names {name}, which is not installed: pip install 'asyncrl[{name}]'")


def _installed(module: str) -> Any:
    return importlib.util.find_spec(module)
