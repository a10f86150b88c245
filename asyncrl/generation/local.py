"""The local engine: any Hugging Face causal LM on CPU or one GPU, without vLLM.

The front of it, on the asyncio loop: it turns calls into commands for the engine's thread (`worker.py`) and completions
into results. The rollout loop calls `generate`; the weight follower calls the rest. Layers below: worker (thread) ->
scheduler (slots) -> runner (forward passes) -> kv (cache and attention).

What a request returns depends on its prompt, its parameters and the weights, not on what runs beside it: bit for bit on
CPU. On a GPU the number of rows is constant, which removes most of that dependence, and nothing is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.generation.engine import EngineDead
from asyncrl.generation.runner import Runner, agreeing_sizes
from asyncrl.generation.scheduler import Request, Scheduler
from asyncrl.generation.staging import Staging
from asyncrl.generation.worker import Abort, Command, Stop, Submit, Swap, Worker
from asyncrl.models import build_model
from asyncrl.types import Completion, SamplingParams
from asyncrl.weights.messages import JoinSpec, PlanSpec

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.weights.receiver import Receiver

OnUpdate = Literal["keep", "recompute", "drain"]


class LocalEngine:
    """Implements `engine.Engine`. `version` -1 means that `build` gives a model without weights: requests wait."""

    num_weight_ranks = 1

    def __init__(
        self,
        build: Callable[[], PreTrainedModel],
        *,
        max_concurrency: int = 64,
        max_length: int = 2048,
        on_update: OnUpdate = "keep",
        version: int = 0,
    ) -> None:
        """`max_length` bounds prompt plus response, in tokens."""
        self._build = build
        self._max_concurrency = max_concurrency
        self._max_length = max_length
        self._on_update = on_update
        self._first_version = version
        self._keys = itertools.count()
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._dead: BaseException | None = None
        self._swapping: asyncio.Future[None] | None = None
        self._requests = 0
        self._receiver: Receiver | None = None

    @classmethod
    def of_config(cls, config: Config) -> LocalEngine:
        """The engine of a run's generator: a structure without weights, which the trainer sends."""
        device = choose_device(config.generation.device)
        dtype = choose_dtype(config.generation.dtype, device)
        return cls(
            lambda: build_model(config.model.path, dtype=dtype, device=device, weights=False),
            max_concurrency=config.generation.max_concurrency,
            max_length=config.training.seq_len,
            on_update=config.generation.on_update,
            version=-1,
        )

    @classmethod
    def with_weights(cls, config: Config) -> LocalEngine:
        """An engine that serves the model of `model.path` as it is, as version 0: for evaluation, without a trainer."""
        device = choose_device(config.generation.device)
        dtype = choose_dtype(config.generation.dtype, device)
        return cls(
            lambda: build_model(config.model.path, dtype=dtype, device=device, seed=config.seed),
            max_concurrency=config.generation.max_concurrency,
            max_length=config.training.seq_len,
        )

    @property
    def version(self) -> int:
        return self._first_version if self._worker is None else self._worker.version

    async def start(self) -> None:
        """Build the model in the engine's thread and begin to serve. Raises ValueError on bad settings."""
        self._loop = asyncio.get_running_loop()
        ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await ready

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion. Cancelling the call aborts the request.

        Raises ValueError for a request that could never be served, EngineDead when the engine failed or was closed.
        """
        self._check(prompt_ids, params)
        request = Request(key=next(self._keys), prompt=tuple(int(t) for t in prompt_ids), params=params)
        future = self._futures[request.key] = self._loop.create_future()
        self._requests += 1
        self._commands.put(Submit(request=request))
        try:
            return await future
        except asyncio.CancelledError:
            self._commands.put(Abort(key=request.key))
            raise
        finally:
            self._futures.pop(request.key, None)

    async def join_weights(self, spec: JoinSpec) -> None:
        from asyncrl.weights.receiver import Receiver

        self._receiver = self._receiver or Receiver()
        await asyncio.to_thread(self._receiver.join, spec, 0, self._device)

    async def receive_weights(self, plan: PlanSpec) -> list[int]:
        """Receive into the staged set, on another thread, while the served set goes on sampling."""
        assert self._receiver is not None, "join_weights() comes first"
        self._staging.begin(t.name for t in plan.tensors)
        return await asyncio.to_thread(self._receiver.receive, plan, self._staging.load)

    async def commit_weights(self, version: int) -> None:
        """Swap between two tokens. With `drain`, returns once all requests that run now have ended."""
        self._raise_if_dead()
        done = self._swapping = self._loop.create_future()
        self._commands.put(Swap(version=version, apply=self._staging.swap, done=lambda e: self._post(_settle, done, e)))
        await done

    async def discard_weights(self) -> None:
        """The served set was never touched: nothing to undo."""

    async def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights from this process (evaluation, a synchronous loop): stage them, then commit."""
        tensors = list(tensors)
        self._staging.begin(name for name, _ in tensors)
        self._staging.load(tensors)
        await self.commit_weights(version)

    def activity(self) -> dict[str, float]:
        worker = self._worker
        return {
            "tokens": worker.tokens if worker else 0,
            "requests": self._requests,
            "busy_s": worker.busy_s if worker else 0.0,
            "pause_s": worker.pause_s if worker else 0.0,
        }

    async def close(self) -> None:
        """End the thread; requests that run return what they have, with finish reason `abort`."""
        if self._thread is None:
            return
        for key in list(self._futures):
            self._commands.put(Abort(key=key))
        self._commands.put(Stop())
        self._dead = self._dead or EngineDead("the engine was closed")
        await asyncio.to_thread(self._thread.join)
        if self._receiver is not None:
            self._receiver.leave()

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._raise_if_dead()
        if len(prompt_ids) == 0 or params.max_tokens < 1:
            raise ValueError(f"a request needs a prompt and max_tokens >= 1: {len(prompt_ids)}, {params.max_tokens}")
        if len(prompt_ids) + params.max_tokens > self._limit:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens plus max_tokens {params.max_tokens} exceeds {self._limit}: "
                f"training.seq_len is {self._max_length}"
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocabulary:
            raise ValueError(f"a token id is outside of the model's vocabulary of {self._vocabulary}")
        if not params.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {params.temperature}")

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the local engine ended: {self._dead}") from self._dead

    def _serve(self, ready: asyncio.Future[None]) -> None:
        """The thread: build, serve until told to stop; a failure reaches everyone who waits."""
        try:
            self._worker = self._make_worker()
            self._post(_settle, ready, None)
            self._worker.run()
        except BaseException as error:  # noqa: BLE001 the thread's boundary: those who wait raise it
            self._post(self._die, ready, error)

    def _make_worker(self) -> Worker:
        model = self._build()
        runner = Runner(model, num_slots=self._max_concurrency)
        self._device = runner.device
        self._vocabulary = model.config.get_text_config().vocab_size
        self._limit = min(self._max_length, longest_context(model))
        self._staging = Staging(model)
        if self._first_version < 0:
            randomise(model)
        runner.sizes = agreeing_sizes(runner) if runner.device.type == "cpu" else [runner.num_slots]
        return Worker(
            Scheduler(runner, max_concurrency=self._max_concurrency),
            commands=self._commands,
            deliver=lambda done: self._post(self._deliver, done),
            on_update=self._on_update,
            version=self._first_version,
        )

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Call `function` on the loop, from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, done: list[tuple[int, Completion]]) -> None:
        for key, completion in done:
            _settle(self._futures.get(key), None, completion)

    def _die(self, ready: asyncio.Future[None], error: BaseException) -> None:
        if not ready.done():
            ready.set_exception(error)
            return
        self._dead = error
        for future in [*self._futures.values(), self._swapping]:
            _settle(future, EngineDead(f"the local engine failed: {error!r}"), None)


def _settle(future: asyncio.Future | None, error: BaseException | None, result: object = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU when there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"generation.device is {name}, but torch sees no GPU; use cpu or auto")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on CPU, bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def longest_context(model: PreTrainedModel) -> int:
    """The positions a model has; those with rotary embeddings name the length they were made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def randomise(model: PreTrainedModel) -> None:
    """Finite values for the uninitialised weights, so that the start-up comparison of row counts can use them."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
