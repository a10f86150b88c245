"""A live vLLM engine with the sender that feeds it, and models made to tell the truth about themselves.

Used by the vLLM tests, on CPU and on a GPU alike. With two GPUs the sender sits on the second one and weights travel by
NCCL; with one GPU it shares this with vLLM, which reads its memory; otherwise it sits on the CPU and they travel by
gloo.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.generation.engine import Engine
from asyncrl.generation.vllm import VLLMEngine, _pass_markers
from asyncrl.models import TINY, build_model
from asyncrl.settings import load, resolve
from asyncrl.types import Completion, SamplingParams
from asyncrl.weights.follower import follow
from asyncrl.weights.gather import describe
from asyncrl.weights.messages import JoinSpec, SyncReport
from asyncrl.weights.plan import buckets, make_plan
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.store import give_up, serve_store, watch_store
from asyncrl.weights.wire import open_wire

FIRST_LETTER = 10
"""The token that version 0 of a revealing model samples; version v samples the v-th after it."""
NUM_LETTERS = 40
ON_GPU = torch.cuda.is_available()
GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda", GPUS - 1) if GPUS else torch.device("cpu")


class Stage:
    """The engine under test. `publish` sends a model to it as the next version, the way a trainer does."""

    def __init__(self, folder: Path, *, procs: int = 1) -> None:
        vllm: dict[str, Any] = {"gpu_memory_utilization": 0.3} if ON_GPU else {"kv_cache_memory_bytes": 256 << 20}
        config = load(None, {"run_dir": str(folder), "generation.engine": "vllm"})
        config.model.path = TINY
        config.generation.dtype = "bfloat16"
        config.generation.max_concurrency = 24
        config.services.generator.procs = procs
        config.generation.vllm = {**vllm, "stream_interval": 3}
        config.training.seq_len = 1024
        config.weights.bucket_bytes = 64 << 10
        config.weights.timeout_s = 60.0
        if GPUS == 1 and procs == 1:
            config.weights.backend = "ipc"
        self.run_config = resolve(config)
        self.config = self.run_config.config
        self.loop = asyncio.new_event_loop()
        self.version = -1
        self.model: PreTrainedModel = peaked_model(0)
        self.device = DEVICE if procs == 1 else torch.device("cpu")  # NCCL refuses a GPU that a worker uses
        self._sender = WeightSender(tensors=self._tensors, rank=0, config=self.config.weights, device=self.device)
        self._at_tensor: dict[int, Callable[[], None]] = {}
        self.start_engine()

    def start_engine(self) -> None:
        """Start an engine, the first or a replacement, and have it follow the sender."""
        self.engine = VLLMEngine(self.run_config, 0)
        self.run(self.engine.start(), timeout_s=280)
        _pass_markers(self.engine._llm.engine_core)  # lets a newer vLLM be stamped the way an older one is
        self.follower = self.loop.create_task(self.follow(self.engine, 0))

    def run(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float = 180.0) -> Any:
        """Run one coroutine to its end on the engine's loop; a dead follower fails it."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    async def publish(self, model: PreTrainedModel | None = None) -> int:
        """Send `model` as the next version (or the current one again); returns the version once it serves."""
        if model is not None:
            self.model, self.version = model.to(self.device), self.version + 1
        while not (report := await asyncio.to_thread(self._sender.publish, self.version)).receivers:
            assert not report.dropped, report
            assert not self.follower.done(), self.follower
            await asyncio.sleep(0.02)  # the engine has not said hello yet
        assert self.engine.version == self.version
        return self.version

    async def publish_and_kill(self, model: PreTrainedModel) -> SyncReport:
        """Send `model` as the next version and kill vLLM's processes when half of it is on the wire."""
        self.model, self.version = model.to(self.device), self.version + 1
        self.at_half(kill_vllm)
        report = await asyncio.to_thread(self._sender.publish, self.version)
        return report

    def at_half(self, call: Callable[[], None]) -> None:
        """Call this, once, in the sender's thread when half of the model is on the wire."""
        self._at_tensor[len(list(self.model.parameters())) // 2] = call

    def close(self) -> None:
        self.follower.cancel()
        self.loop.run_until_complete(asyncio.gather(self.follower, return_exceptions=True))
        self.loop.run_until_complete(self.engine.close())
        self._sender.close()
        self.loop.close()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(self.model.named_parameters()):
            self._at_tensor.pop(index, lambda: None)()
            yield pair

    async def follow(self, engine: Engine, index: int) -> None:
        """Have an engine follow the sender until cancelled."""
        address = self._sender.address
        assert address is not None
        await follow(
            address, engine, index=index, incarnation="test", config=self.config.weights, on_version=lambda _: None
        )


async def abortive_sync(stage: Stage, generation: int, num_buckets: int) -> None:
    """A broadcast to the engine of which only `num_buckets` buckets come. Raises what its engine raises."""
    plan = make_plan(describe(lambda: stage.model.named_parameters()), 64 << 10, 2)
    store = serve_store("127.0.0.1", 30.0)
    spec = JoinSpec(host="127.0.0.1", port=store.port, generation=generation, first_rank=1, world_size=2,
                    backend="gloo", timeout_s=30.0)  # fmt: skip
    watch = watch_store(store, spec)
    wire, _ = await asyncio.gather(
        asyncio.to_thread(open_wire, store, spec, 0, torch.device("cpu"), watch), stage.engine.join_weights(spec)
    )
    receiving = asyncio.create_task(stage.engine.receive_weights(plan))
    for bucket in buckets(plan)[:num_buckets]:
        wire.start(torch.zeros(bucket.nbytes, dtype=torch.uint8))
    await asyncio.to_thread(wire.drain, watch)
    await asyncio.sleep(0.5)  # the worker waits for the next bucket, or will: it is told either way
    give_up(store, generation, "the test gave up")
    try:
        await receiving
    finally:
        wire.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def kill_vllm() -> None:
    """SIGKILL every process that vLLM started."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended by itself
            words = " ".join([child.name(), *child.cmdline()])
            if any(mark in words for mark in ("VLLM", "EngineCore", "spawn_main")):
                child.kill()


def peaked_model(seed: int) -> PreTrainedModel:
    """The tiny model with weights large enough that its distributions are far from uniform, in bfloat16."""
    model = build_model(TINY, dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 0.35 if "embed" in name else 1.2 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(torch.bfloat16)


def revealing_model(version: int) -> PreTrainedModel:
    """A model that samples token FIRST_LETTER + version after whatever came before.

    Attention and MLP add nothing and every embedding points the same way, so the final state is always the same vector;
    its product with the (tied) embedding is largest, by far, for the one long embedding.
    """
    assert 0 <= version < NUM_LETTERS
    model = build_model(TINY, dtype=torch.float32, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if parameter.ndim == 2 else 1.0)
            if "embed" in name:
                parameter.fill_(0.01)
                parameter[FIRST_LETTER + version] = 1.0
    return model.to(torch.bfloat16)


def prompts(num: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """Random token ids, none of them special."""
    return np.random.default_rng(seed).integers(4, 50, (num, length)).tolist()


def sampling(max_tokens: int, *, temperature: float = 1.0, stop: Sequence[int] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_token_ids=tuple(stop))


@dataclasses.dataclass(slots=True)
class Scored:
    """Log-probabilities that the trainer's side gives to the tokens of one completion, fp32 (T,)."""

    alone: np.ndarray
    batched: np.ndarray
    """The same, computed in one padded batch: what differs from `alone` is the trainer's own noise."""


def score(model: PreTrainedModel, completions: Sequence[Completion], *, temperature: float = 1.0) -> list[Scored]:
    """A plain forward pass of the trainer's model over each whole sequence."""
    sequences = [torch.tensor([*c.prompt_ids, *c.token_ids]) for c in completions]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    scored = []
    with torch.no_grad():
        batch = _logprobs(model, padded, temperature)
        for row, (sequence, completion) in enumerate(zip(sequences, completions, strict=True)):
            alone = _logprobs(model, sequence[None], temperature)[0]
            span = slice(len(completion.prompt_ids) - 1, len(sequence) - 1)
            scored.append(Scored(alone[span].numpy(), batch[row, : len(sequence) - 1][span].numpy()))
    return scored


def _logprobs(model: PreTrainedModel, ids: Tensor, temperature: float) -> Tensor:
    logits = model(ids.to(model.device)).logits.float().cpu() / temperature
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def k3(behaviour: np.ndarray, current: np.ndarray) -> float:
    """Mean of exp(d) - 1 - d with d = current - behaviour: an estimate of the divergence of the two policies."""
    difference = current.astype(np.float64) - behaviour.astype(np.float64)
    return float(np.mean(np.exp(difference) - 1 - difference))
