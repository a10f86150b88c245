"""The vLLM engine: AsyncLLM as an `Engine` (see `engine.py`), with weights that change while requests run.

A generator process makes one. vLLM runs its scheduler and workers in child processes; this file is their client: it
admits requests, collects streamed tokens, stamps each with the policy version that sampled it, and pauses generation
around a weight sync. It never moves weights itself (`vllm_worker.py` does, inside vLLM's workers), and it never returns
a completion that vLLM aborted as a finished one.

Why versions are exact: no request is handed to vLLM while weights change, generation stands still between the last
old token and the first new one, and the boundary is taken there. vLLM >= 0.32 reports it (`weight_versions`); for
older ones every output that vLLM sent before it paused is processed first, and then tokens are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncrl.generation.engine import EngineDead
from asyncrl.generation.vllm_args import engine_arguments, prepare_environment, wide_head
from asyncrl.generation.vllm_logits import has_switch
from asyncrl.models import load_tokenizer
from asyncrl.types import Completion, FinishReason, SamplingParams
from asyncrl.weights.messages import JoinSpec, PlanSpec
from asyncrl.weights.plan import buckets

if TYPE_CHECKING:
    from asyncrl.settings import Run

PAUSE = {"keep": ("keep", False), "recompute": ("keep", True), "drain": ("wait", False)}
"""generation.on_update -> (vLLM's pause mode, drop the KV cache; running requests compute theirs again)."""
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
MARGIN_S = 10.0
"""What an answer may take beyond the bound that the worker itself keeps."""


@dataclass(slots=True)
class _Request:
    """A request in flight. `starts` are (version, index of its first token), in order; used before vLLM 0.32."""

    id: str
    starts: list[tuple[int, int]]
    queue: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True, frozen=True)
class _Marker:
    """In the queue of vLLM's outputs: called when all before it are processed."""

    call: Callable[[], None]


class VLLMEngine:
    """Implements `Engine`. All methods run on one asyncio loop."""

    def __init__(self, run: Run, index: int) -> None:
        self.version = -1
        self.num_weight_ranks = run.config.services.generator.procs
        self.loaded = ""
        """How the workers took the last weights: model, learnt or repeated (`copies.py`)."""
        self.sync_times: dict[str, float] = {}
        """Of the last sync: `pause_s`, `load_s`, seconds."""
        self._config, self._index = run.config, index
        self._llm: Any = None
        self._running: dict[str, _Request] = {}
        self._open = asyncio.Event()  # set: requests may be handed to vLLM
        self._adding = 0
        self._none_adding = asyncio.Event()
        self._none_adding.set()
        self._slots = asyncio.Semaphore(run.config.generation.max_concurrency)
        self._count = self._commits = 0
        self._timeout_s = run.config.weights.timeout_s
        self._paused_at: float | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._death = ""
        """Why this engine can serve nothing more."""
        self._busy_since = 0.0
        self._activity = {"tokens": 0.0, "requests": 0.0, "busy_s": 0.0, "pause_s": 0.0}

    async def start(self) -> None:
        """Start vLLM with random weights; requests wait until the first `commit_weights`."""
        import torch

        on_gpu = torch.cuda.is_available()
        prepare_environment(on_gpu=on_gpu)
        arguments = engine_arguments(self._config, index=self._index, on_gpu=on_gpu)
        self._tokenizer = load_tokenizer(self._config.model.path)
        self._slots = asyncio.Semaphore(arguments["max_num_seqs"])
        # In a thread: it takes tens of seconds, and this loop sends heartbeats meanwhile.
        self._llm = await asyncio.to_thread(_start_vllm, arguments)
        if on_gpu and not has_switch() and wide_head(self._config, arguments):
            await self._rpc("asyncrl_widen_head")
        self._reports_versions = _reports_versions()
        if not self._reports_versions:
            _pass_markers(self._llm.engine_core)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion. Cancelling the call aborts the request in vLLM. Raises EngineDead, ValueError."""
        self._check_alive()
        ids = [int(token) for token in prompt_ids]
        limit = self._llm.model_config.max_model_len
        if len(ids) >= limit:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for a response within {limit}")
        async with self._slots:  # no more than vLLM runs at once: none waits inside it with an old cache salt
            request = await self._admit(ids, params)
            try:
                last = await self._collect(request)
            finally:
                await self._retire(request)
        return self._completion(ids, request, last)

    async def _admit(self, ids: list[int], params: SamplingParams) -> _Request:
        while not self._open.is_set():
            await self._open.wait()
        self._check_alive()
        self._count += 1
        request = _Request(f"{self._index}-{self._count}", [(self.version, 0)])
        # The salt keeps the prefix cache of some weights from serving requests of others; a trainer that was resumed
        # brings others under the same version.
        prompt = {"prompt_token_ids": ids, "cache_salt": f"v{self.version}-{self._commits}"}
        self._adding += 1
        self._none_adding.clear()
        try:
            request.queue = await self._llm.add_request(request.id, prompt, _vllm_params(params))
        except _dead_errors() as error:
            raise self._dead() from error
        finally:
            self._adding -= 1
            if not self._adding:
                self._none_adding.set()
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[request.id] = request
        return request

    async def _collect(self, request: _Request) -> Any:
        """Take streamed tokens until the request ends; returns vLLM's last output of it."""
        try:
            while True:
                output = request.queue.get_nowait() or await request.queue.get()
                part = output.outputs[0]
                request.token_ids.extend(part.token_ids)
                pairs = zip(part.token_ids, part.logprobs or (), strict=False)
                request.logprobs.extend(entry[token].logprob for token, entry in pairs)
                self._activity["tokens"] += len(part.token_ids)
                if output.finished:
                    request.finished = True
                    return part
        except _dead_errors() as error:
            raise self._dead() from error

    async def _retire(self, request: _Request) -> None:
        del self._running[request.id]
        self._activity["requests"] += 1
        if not self._running:
            self._activity["busy_s"] += time.monotonic() - self._busy_since
        if not request.finished and not self._llm.errored:
            await self._llm.abort(request.id)

    def _completion(self, ids: list[int], request: _Request, last: Any) -> Completion:
        if len(request.logprobs) != len(request.token_ids):
            got = f"{len(request.logprobs)} log-probabilities for {len(request.token_ids)} tokens"
            raise RuntimeError(f"vLLM returned {got} of request {request.id}")
        return Completion(
            prompt_ids=np.asarray(ids, np.int32),
            token_ids=np.asarray(request.token_ids, np.int32),
            logprobs=np.asarray(request.logprobs, np.float32),
            versions=self._versions(request, getattr(last, "weight_versions", None)),
            finish_reason=FINISH.get(last.finish_reason, "abort"),
            text=str(self._tokenizer.decode(request.token_ids, skip_special_tokens=True)),
        )

    def _versions(self, request: _Request, spans: list[Any] | None) -> np.ndarray:
        num_tokens = len(request.token_ids)
        reported = [(int(span.version), span.start) for span in spans or ()]
        starts = reported if self._reports_versions else request.starts
        versions = np.full(num_tokens, -1, np.int32)
        for version, start in starts:
            versions[start:] = version
        if (versions < 0).any():
            raise RuntimeError(f"vLLM reported no version for some of the {num_tokens} tokens of request {request.id}")
        return versions

    # -- weights -------------------------------------------------------------------------------------------------

    async def join_weights(self, spec: JoinSpec) -> None:
        """Enter the weight group `spec` describes with every worker. Raises RuntimeError when one of them cannot."""
        self._timeout_s = spec.timeout_s
        await self._rpc("asyncrl_join", _json(spec))

    async def receive_weights(self, plan: PlanSpec) -> list[int]:
        """Pause, receive into the model, stay paused. Returns a checksum per bucket, equal in all workers."""
        # Each bucket has its own bound in the worker; this one only catches a worker that hangs elsewhere.
        text, bound_s = _json(plan), self._timeout_s * (1 + len(buckets(plan)))
        before = self._paused_at  # by an attempt that was neither committed nor discarded
        self._open.clear()
        await self._none_adding.wait()
        self._paused_at = time.monotonic()
        self._pausing = self._pause(bound_s)
        if self._config.generation.on_update != "keep":
            await self._stand_still()
            self._paused_at = time.monotonic()
        # Otherwise this goes out right behind the pause. Workers take it once they have queued the step they are in:
        # on the device the new weights follow it, and its tokens, which are of the old ones, come back before the
        # pause is answered, while buckets arrive.
        await self._rpc("asyncrl_begin", text, before is not None)
        try:
            await self._stand_still()
        finally:
            results = await self._rpc("asyncrl_end", bound_s=bound_s)
        stood_still = time.monotonic() - max(result["pause_s"] for result in results)
        self._paused_at = before or max(self._paused_at, stood_still)
        checksums = results[0]["checksums"]
        for rank, result in enumerate(results):
            if result["checksums"] != checksums:
                raise RuntimeError(f"worker {rank} received other bytes than worker 0 of the same engine")
        self.loaded, self.sync_times = results[0]["loaded"], {"load_s": max(result["load_s"] for result in results)}
        return checksums

    async def commit_weights(self, version: int) -> None:
        """Serve the received weights as `version` from the next token on."""
        if self._reports_versions:
            await self._within(self._llm.update_weight_version(str(version)), "set its version")
        else:
            self._mark(version)
        self.version, self._commits = version, self._commits + 1
        await self._resume()

    async def discard_weights(self) -> None:
        """Go on with the old weights if nothing was overwritten; raises EngineDead if something was."""
        if self._paused_at is None:
            return
        await self._stand_still()
        if any(await self._rpc("asyncrl_touched")):
            raise self._dead("a weight sync failed half-way: the old weights are overwritten, the new ones incomplete")
        await self._resume()

    async def _stand_still(self) -> None:
        """Wait for the pause that was begun, if one was."""
        if self._pausing is not None:
            pausing, self._pausing = self._pausing, None
            await pausing

    def _pause(self, bound_s: float) -> asyncio.Task[None]:
        """Begin to pause; the task waits until vLLM stands still: its answer comes after every token sampled before."""
        mode, clear_cache = PAUSE[self._config.generation.on_update]
        # Not AsyncLLM.pause_generation: that also sleeps for 20 ms, which is half of what a sync takes.
        pause = self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        # A task at once: tasks begin in the order they were made, so that no later order overtakes this one.
        pause = asyncio.ensure_future(pause)
        return asyncio.create_task(self._within(pause, "pause", bound_s=bound_s))

    async def _resume(self) -> None:
        """Send vLLM on, behind all that was ordered before. Its answer is not waited for: it takes 4 ms, because its
        process works on the next step by then. Without one this engine is dead."""
        answer = asyncio.ensure_future(self._llm.resume_generation())
        self._resuming = asyncio.create_task(self._within(answer, "resume"))
        self._resuming.add_done_callback(self._resumed)
        await asyncio.sleep(0)  # the order leaves
        if self._paused_at is not None:
            self.sync_times["pause_s"] = time.monotonic() - self._paused_at
            self._activity["pause_s"] += self.sync_times["pause_s"]
        self._paused_at = None
        if self.version >= 0:
            self._open.set()

    def _resumed(self, answer: asyncio.Task[None]) -> None:
        if not answer.cancelled() and (error := answer.exception()) is not None:
            self._dead(f"vLLM did not go on after a weight sync: {error!r}")

    def _mark(self, version: int) -> None:
        """Note for every running request how many tokens it has once all that vLLM has sent by now is processed: what
        follows is of `version`. Before vLLM 0.32."""
        if not self._running:  # before the first request nobody takes outputs, so a marker would stay where it is
            return
        running = list(self._running.values())

        def note() -> None:
            states = self._llm.output_processor.request_states.values()
            counts = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}
            for request in running:
                if request.id in counts:  # otherwise it has finished, all of it under older versions
                    request.starts.append((version, counts[request.id]))

        self._llm.engine_core.outputs_queue.put_nowait(_Marker(note))

    async def _rpc(self, method: str, *args: str | bool, bound_s: float | None = None) -> list[Any]:
        """Call a method of the worker extension in every worker."""
        return await self._within(self._llm.collective_rpc(method, args=args), f"answer {method}", bound_s=bound_s)

    async def _within(self, call: Any, what: str, *, bound_s: float | None = None) -> Any:
        """Await `call`, bounded. vLLM never answers from a dead engine, so its death is looked for meanwhile."""
        task = asyncio.ensure_future(call)
        bound_s = (bound_s or self._timeout_s) + MARGIN_S
        deadline = time.monotonic() + bound_s
        try:
            while not task.done():
                self._check_alive()
                if time.monotonic() > deadline:
                    raise self._dead(f"vLLM did not {what} within {bound_s:.0f} s")
                await asyncio.wait({task}, timeout=0.5)
            return task.result()
        except _dead_errors() as error:
            raise self._dead() from error
        finally:
            task.cancel()

    # -- life ----------------------------------------------------------------------------------------------------

    def activity(self) -> dict[str, float]:
        """Cumulative counters. Raises EngineDead, so that an idle generator's heartbeat finds a dead engine too."""
        if self._llm is not None:
            self._check_alive()
        running = time.monotonic() - self._busy_since if self._running else 0.0
        return {**self._activity, "busy_s": self._activity["busy_s"] + running}

    async def close(self) -> None:
        """End vLLM and its processes."""
        if self._resuming is not None:
            self._resuming.cancel()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _check_alive(self) -> None:
        if self._death or self._llm.errored:
            raise self._dead()

    def _dead(self, reason: str = "vLLM's engine process has died; its last words are in this log") -> EngineDead:
        """Nothing more is served. Requests that wait for the end of a sync are let through, to find this out."""
        self._death = self._death or reason
        self._open.set()
        return EngineDead(self._death)


def _start_vllm(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _reports_versions() -> bool:
    """Whether this vLLM says which version sampled a token; one that only has `update_weight_version` does not."""
    from vllm.outputs import CompletionOutput

    return any(f.name == "weight_versions" for f in fields(CompletionOutput))


def _vllm_params(params: SamplingParams) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _pass_markers(engine_core: Any) -> None:
    """Make vLLM's output handler call the markers it finds in its queue: all outputs before one are then processed.

    Called before the handler takes its first output.
    """
    take = engine_core.get_output_async

    async def take_output() -> Any:
        while isinstance(output := await take(), _Marker):
            output.call()
        return output

    engine_core.get_output_async = take_output


def _dead_errors() -> type[BaseException]:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
