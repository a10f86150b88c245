"""The configuration: one Struct per section of the YAML. The docstring under a field is its help text.

Section and key names are those that users of PyTorch-native RL stacks know. A default is the value we would run
ourselves. Loading, overriding and the checks across sections live in `settings.py`; this file only declares.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=10)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: keyword-only, unknown keys refused."""


class ModelConfig(Section):
    """The policy's initial weights."""

    path: str = "tiny"
    """A local Hugging Face folder, a hub name, or `tiny`: a 0.4M-parameter Qwen3 with characters as tokens, built on
    the spot and warmed up."""
    attention: Literal["auto", "sdpa", "flash", "flex"] = "auto"
    """How packed sequences attend within themselves. `auto`: flash on GPUs that have it, SDPA otherwise."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    system_prompt: str | None = None
    """Put before the messages of every prompt that has none."""


class DatasetConfig(Section):
    """Where prompts come from, for environments that read a dataset. What is none is the environment's own choice."""

    path: str | None = None
    """A hub name, a local folder, or a .jsonl, .json, .parquet or .csv file."""
    name: str | None = None
    """The configuration of a hub dataset that has several."""
    split: str | None = None
    """The split to train on; none: the environment's, mostly `train`."""
    eval_split: str | None = None
    """The split to evaluate on; none: the environment's, or the training split where it names none."""
    prompt_key: str | None = None
    """The column that holds the prompt, as text or as a list of chat messages; none: the environment's, mostly
    `question`."""
    answer_key: str | None = None
    """The column that holds the reference answer; none: the environment's, mostly `answer`."""
    completion_key: str | None = None
    """The column that holds a response to learn from in supervised training, as text or as a list of chat messages that
    ends with the assistant's; none: the environment's, for `dataset` `completion` or `messages`."""
    streaming: bool = False
    """Read as a stream instead of downloading first."""
    shuffle: bool = True
    """Shuffle by the run's seed, differently in each epoch."""
    shuffle_buffer: Count = 10_000
    """Rows that a stream shuffles among."""
    epochs: Count | None = None
    """How often the data may be seen; none: as often as the run needs."""
    on_missing: Literal["error", "skip", "keep"] = "error"
    """A row without a prompt or an answer (null, empty): refuse the dataset, leave the row out, or `keep` a missing
    answer for a reward of your own; a missing prompt is refused then too."""
    limit: Count | None = None
    """Use only this many rows from the start of the split."""


class CurriculumConfig(Section):
    """Which prompts are worth sampling again; off by default."""

    rest: Whole = 0
    """Visits for which a prompt is skipped after a group that was all right or all wrong, doubled while the outcome
    repeats; 0: off."""
    max_rest: Count = 64
    """Longest rest, in visits."""
    solved: float | None = None
    """Mean reward from which a group counts as all right; default: the environment's full marks."""
    unsolved: float = 0.0
    """Mean reward up to which a group counts as all wrong."""
    key: str | None = None
    """Entry of a prompt's metadata that names its kind (a level, a topic): the kind rests as one. None: each prompt."""
    max_skips: Count = 1000
    """Prompts skipped in a row before one is let through all the same."""


class LoraConfig(Section):
    """Low-rank adapters through peft; off when rank is 0."""

    rank: Whole = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """Scale of the adapters."""
    target_modules: str = "all-linear"
    """Which modules get adapters, as peft understands it."""


class TrainingConfig(Section):
    """The optimiser step."""

    steps: Count = 100
    """Optimiser batches to train."""
    batch_size: Count = 32
    """Prompts (groups) per batch, over all ranks; responses per batch are batch_size * algo.n_samples."""
    minibatches: Count = 1
    """Optimiser steps per batch; more than one makes a proximal policy meaningful."""
    learning_rate: Rate = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises from zero."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0 never clips."""
    seq_len: Count = 2048
    """Longest prompt plus response that is trained; longer ones are refused at start-up or dropped by name."""
    tokens_per_micro_batch: Count = 16384
    """Packing budget of one forward pass, per rank."""
    gradient_accumulation_steps: Count | None = None
    """Exactly this many micro-batches per minibatch instead of a token budget."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type; master weights and reductions are fp32 always."""
    sync_interval: Count = 1
    """Publish weights every this many steps."""
    entropy_coef: float = 0.0
    """Weight of the exact entropy bonus."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters and optimiser state in host memory."""
    compile: bool = False
    """torch.compile the transformer blocks."""
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    """Low-rank adapters."""
    warmup_sft_steps: Whole | None = None
    """Supervised warm-up before RL, in steps; by default only the `tiny` model gets one."""


class ReplayConfig(Section):
    """The buffer between generators and trainer: what bounds staleness, order and size."""

    target_lag: Whole = 2
    """S: how many steps generation may run ahead of training; 0 is synchronous RL."""
    max_lag: Whole | None = None
    """M: no trained token is older than this many versions; default target_lag + 2 (target_lag 0: 0)."""
    order: Literal["window", "fifo", "freshest", "uniform", "priority"] = "window"
    """Which buffered groups are trained next. `window`: oldest lease first, bounded by max_lag, nothing dropped."""
    stale: Literal["hold", "drop"] = "hold"
    """`drop` discards groups that grew older than max_lag, under orders that cannot hold the bound."""
    reuse: Count = 1
    """How often a group may be trained on."""
    capacity_groups: Count | None = None
    """Groups the buffer holds before producers wait; default (target_lag + 2) * batch_size."""
    capacity_bytes: Count = 2 << 30
    """Bytes the buffer holds before producers wait."""
    lease_timeout_s: Positive = 600.0
    """A lease not renewed by a heartbeat for this long expires, and its prompt is leased again."""
    max_filtered: Count = 200
    """Batches' worth of consecutive filtered groups after which the run ends with an error that says so; a tenth of it
    when rollouts or rewards fail."""
    journal: bool = True
    """Keep groups and leases on disk so that an acknowledged insert survives a crash."""
    share_files: bool = True
    """Processes on the replay server's host leave large groups in files and send where they lie."""
    bind: str = "tcp://127.0.0.1:*"
    """Where the replay server listens; anything but loopback needs keys."""
    keys: str | None = None
    """Folder of CURVE keys made by `asyncrl keys new`."""


class GenerationConfig(Section):
    """How responses are sampled."""

    engine: Literal["auto", "local", "vllm"] = "auto"
    """`auto`: vLLM when it and a GPU are there, the local engine otherwise."""
    max_tokens: Count = 512
    """Longest response, per completion."""
    max_concurrency: Count = 64
    """Requests that one generator decodes at once."""
    max_groups: Count | None = None
    """Groups that one generator works on at once; default max_concurrency / n_samples, at least 1."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Running requests when weights arrive: keep their KV cache, recompute it, or finish first."""
    device: str = "auto"
    """Device of the local engine: auto, cpu, cuda, cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the generator's weights; auto: float32 on CPU, bfloat16 on GPU."""
    fp32_lm_head: bool = True
    """Logits in float32 from vLLM, as the trainer computes them: rounding them to bfloat16 is most of what the two
    disagree about. Not with a quantised model."""
    reward_workers: Count = 1
    """Processes per generator that compute rewards."""
    reward_timeout_s: Positive = 30.0
    """A reward that takes longer is stopped and its group dropped, reason `reward_timeout`."""
    rollout_timeout_s: Positive = 600.0
    """A rollout that takes longer is dropped, reason `rollout_timeout`."""
    thinking: bool | None = None
    """Passed to chat templates that know `enable_thinking`."""
    vllm: dict[str, Any] = {}
    """vLLM engine arguments by name."""


class WeightsConfig(Section):
    """How new weights travel to the generators."""

    bucket_bytes: Count = 1 << 30
    """Size of one broadcast bucket."""
    num_buffers: Count = 2
    """Buckets that a receiver holds before it loads them: the more, the more arrives before vLLM has paused. The
    trainer holds two."""
    backend: Literal["auto", "nccl", "gloo", "ipc"] = "auto"
    """How buckets travel. `auto`: nccl from a GPU, gloo from a CPU; ipc (receivers read the trainer's memory, on one
    host) where a generator shares its GPU with trainer rank 0 or another, which NCCL refuses. Where ipc fails, gloo."""
    timeout_s: Positive = 120.0
    """Bound of every stage of a sync: join, prepare, each bucket, commit."""
    checksum: bool = True
    """Compare a checksum per bucket before new weights serve."""
    bind: str = "tcp://127.0.0.1:*"
    """Where the trainer's control socket listens; anything but loopback needs keys."""


class ServiceConfig(Section):
    """One kind of process."""

    procs: Count = 1
    """Processes per replica: ranks of the trainer, tensor-parallel workers of a generator."""
    num_replicas: Whole = 1
    """How many replicas run."""
    with_gpus: bool | None = None
    """Give it GPUs; default: when there are any."""


class ReferenceConfig(Section):
    """The reference policy of a KL: sharded over the trainer's ranks, or in processes of its own."""

    procs: Count = 1
    """Only 1: a process of its own holds the whole model."""
    num_replicas: Whole = 0
    """Reference processes, each with the whole model; 0: the trainer's ranks hold it."""
    with_gpus: bool | None = None
    """False keeps it in host memory, and processes of its own on the CPU; default: on the trainer's devices, and a GPU
    for each process when there are any."""
    bind: str = "tcp://127.0.0.1:*"
    """Where a reference process listens; anything but loopback needs keys."""


class ServicesConfig(Section):
    """Which processes run, and how many."""

    generator: ServiceConfig = msgspec.field(default_factory=ServiceConfig)
    """Generators."""
    trainer: ServiceConfig = msgspec.field(default_factory=ServiceConfig)
    """Trainer ranks (procs)."""
    ref_model: ReferenceConfig = msgspec.field(default_factory=ReferenceConfig)
    """The reference policy of a KL."""


class ParallelismConfig(Section):
    """How the trainer's ranks divide the model."""

    tensor_parallel_degree: Count = 1
    """Ranks that share each layer."""
    pipeline_parallel_degree: Count = 1
    """Pipeline stages; only 1 is supported."""
    data_parallel_shard_degree: int = -1
    """Ranks that FSDP shards over; -1: all that remain."""
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model."""


class CheckpointConfig(Section):
    """What is kept for a resume."""

    every: Whole = 50
    """Steps between checkpoints; one more is written at the end. 0: only at the end."""
    keep_last: Count = 2
    """Newest checkpoints kept."""
    keep_every: Whole = 0
    """Also keep every this-many-th checkpoint for good; 0: none."""
    export: bool = True
    """Write the final model as a Hugging Face folder."""


class MetricsConfig(Section):
    """Where figures go."""

    trackers: list[str] = msgspec.field(default_factory=lambda: ["console", "jsonl"])
    """Any of console, jsonl, wandb, tensorboard."""
    samples_per_step: Whole = 2
    """Episodes per step written to samples.jsonl."""
    wandb_project: str = "asyncrl"
    """Project name in W&B."""
    trace: bool = True
    """Write trace.json, which Perfetto opens."""


class SuperviseConfig(Section):
    """Bounds of every wait."""

    start_timeout_s: Positive = 300.0
    """From start to the first sign of life of a process."""
    heartbeat_s: Positive = 2.0
    """How often a process reports to the replay server."""
    dead_after_s: Positive = 60.0
    """A generator not heard from for this long has lost its leases."""
    stall_s: Positive = 60.0
    """A wait longer than this is diagnosed on the terminal."""
    stall_limit_s: Positive = 1800.0
    """A wait longer than this ends the run with that diagnosis."""
    grace_s: Positive = 120.0
    """How long a run goes on without any generator."""
    max_restarts: Whole = 5
    """Restarts of generators and reference processes before the run gives up."""
    stop_timeout_s: Positive = 20.0
    """How long processes get to end cleanly before they are killed."""


class EvalConfig(Section):
    """Evaluation: during training, and `asyncrl eval`."""

    every: Whole = 0
    """Versions between evaluations during training; 0: none."""
    env: str | None = None
    """Environment to evaluate on; default: the training environment's own (other split, or another seed)."""
    num_prompts: Count = 64
    """Prompts per evaluation."""
    n: Count = 1
    """Responses per prompt."""
    temperature: NonNegative | None = None
    """Sampling temperature; default: 0 (greedy) for one response per prompt, 1 for several."""


class Config(Section):
    """Everything a run needs; written resolved to config.yaml in the run folder, which every process reads."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[^./\\][^/\\]*$")] = "run"
    """Name of the run, without slashes; the run folder is runs/<name> unless run_dir says otherwise."""
    run_dir: str | None = None
    """Folder for everything the run writes."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of everything random."""
    imports: list[str] = msgspec.field(default_factory=list)
    """Modules or .py files to import in every process, for their registrations."""
    algo: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "fade"})
    """The algorithm: its name and its own keys. `asyncrl algos NAME` lists them."""
    env: dict[str, Any] = msgspec.field(default_factory=lambda: {"name": "sort_digits"})
    """The environment: its name and its own keys. `asyncrl envs NAME` lists them."""
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    dataset: DatasetConfig = msgspec.field(default_factory=DatasetConfig)
    curriculum: CurriculumConfig = msgspec.field(default_factory=CurriculumConfig)
    training: TrainingConfig = msgspec.field(default_factory=TrainingConfig)
    replay: ReplayConfig = msgspec.field(default_factory=ReplayConfig)
    generation: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    services: ServicesConfig = msgspec.field(default_factory=ServicesConfig)
    parallelism: ParallelismConfig = msgspec.field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = msgspec.field(default_factory=MetricsConfig)
    supervise: SuperviseConfig = msgspec.field(default_factory=SuperviseConfig)
    eval: EvalConfig = msgspec.field(default_factory=EvalConfig)
