"""Continuous batching: requests join and leave between two tokens. Pure bookkeeping around a `Runner`.

Owned by the engine's thread; `worker.py` calls `submit`, `abort`, `step` and `recompute` between two tokens. It has no
clock, thread or socket, and never touches weights.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.generation.kv import Prefill
from asyncrl.generation.runner import Runner
from asyncrl.generation.sampling import sample, uniform
from asyncrl.types import Completion, FinishReason, SamplingParams

PREFILL_TOKENS_KEPT = 4096
"""Tokens of recent prompts whose keys and values are kept, for siblings that come a little later."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion in the making."""

    key: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def finished(self) -> FinishReason | None:
        if self.tokens and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.params.max_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            prompt_ids=np.array(self.prompt, dtype=np.int32),
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=reason,
        )


class Scheduler:
    """At most `max_concurrency` requests at once, each in a slot; the others wait in order."""

    def __init__(self, runner: Runner, *, max_concurrency: int) -> None:
        self.num_tokens = 0
        """Sampled so far."""
        self._runner = runner
        self._free = list(range(max_concurrency))
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._prefills: OrderedDict[tuple[int, ...], tuple[Prefill, Tensor]] = OrderedDict()
        n = runner.num_slots
        self._active_B = np.zeros(n, dtype=bool)
        self._tokens_B = np.zeros(n, dtype=np.int64)
        self._positions_B = np.zeros(n, dtype=np.int64)
        self._seeds_B = np.zeros(n, dtype=np.uint64)
        self._counts_B = np.zeros(n, dtype=np.int64)
        self._temperature_B = np.ones(n, dtype=np.float32)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, key: int) -> Completion | None:
        """Free the request's slot; its completion so far, or None when it has ended already."""
        for slot, request in self._running.items():
            if request.key == key:
                self._release(slot)
                return request.completion("abort")
        for request in self._waiting:
            if request.key == key:
                self._waiting.remove(request)
                return request.completion("abort")
        return None

    def step(self, version: int, *, admit: bool = True) -> list[tuple[int, Completion]]:
        """One token for every running request, after admitting what fits: (key, completion) of those that ended."""
        done = self._admit(version) if admit else []
        if self._running:
            logits_RV = self._runner.decode(self._tokens_B, self._positions_B, self._active_B)
            rows = np.flatnonzero(self._active_B)
            self._positions_B[rows] += 1
            done += self._sample(logits_RV, np.arange(len(logits_RV)), rows, version)
        return done

    def recompute(self) -> None:
        """Build the keys and values of all running requests anew, with the weights as they are now."""
        for slot, request in self._running.items():
            # The last token's are written when it is fed to the model in the next step.
            prefill, _ = self._runner.prefill([*request.prompt, *request.tokens[:-1]])
            self._runner.cache.write([slot], prefill)

    def forget_prefills(self) -> None:
        """To be called when weights change: a prompt's keys and values are those of the weights that made them."""
        self._prefills.clear()

    def _admit(self, version: int) -> list[tuple[int, Completion]]:
        slots, logits = [], []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            slot = heapq.heappop(self._free)
            prefill, logits_V = self._prefill(request.prompt)
            self._runner.cache.write([slot], prefill)
            self._occupy(slot, request)
            slots.append(slot)
            logits.append(logits_V)
        if not slots:
            return []
        return self._sample(torch.stack(logits), np.array(slots), np.array(slots), version)

    def _prefill(self, prompt: tuple[int, ...]) -> tuple[Prefill, Tensor]:
        if prompt not in self._prefills:
            self._prefills[prompt] = self._runner.prefill(list(prompt))
        self._prefills.move_to_end(prompt)
        while len(self._prefills) > 1 and sum(map(len, self._prefills)) > PREFILL_TOKENS_KEPT:
            self._prefills.popitem(last=False)
        return self._prefills[prompt]

    def _occupy(self, slot: int, request: Request) -> None:
        self._running[slot] = request
        self._active_B[slot] = True
        self._positions_B[slot] = len(request.prompt)
        self._counts_B[slot] = 0
        self._seeds_B[slot] = request.params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._temperature_B[slot] = request.params.temperature

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._active_B[slot] = False
        heapq.heappush(self._free, slot)

    def _sample(
        self, logits_RV: Tensor, slots_R: np.ndarray, wanted: np.ndarray, version: int
    ) -> list[tuple[int, Completion]]:
        """Sample a token per row of `logits_RV`, the row of slot `slots_R[i]`; record it for the slots `wanted`."""
        device = logits_RV.device
        uniform_R = torch.from_numpy(uniform(self._seeds_B[slots_R], self._counts_B[slots_R])).to(device)
        tokens_R, logprobs_R = sample(logits_RV, torch.from_numpy(self._temperature_B[slots_R]).to(device), uniform_R)
        self._tokens_B[slots_R] = tokens_R.cpu().numpy()
        self._counts_B[wanted] += 1
        self.num_tokens += len(wanted)
        logprobs_B = dict(zip(slots_R.tolist(), logprobs_R.tolist(), strict=True))
        return self._record(wanted.tolist(), logprobs_B, version)

    def _record(self, slots: list[int], logprobs: dict[int, float], version: int) -> list[tuple[int, Completion]]:
        done = []
        for slot in slots:
            request = self._running[slot]
            if not math.isfinite(logprobs[slot]):
                raise RuntimeError(f"policy version {version} gave a log-probability of {logprobs[slot]}")
            request.tokens.append(int(self._tokens_B[slot]))
            request.logprobs.append(logprobs[slot])
            request.versions.append(version)
            reason = request.finished()
            if reason is not None:
                self._release(slot)
                done.append((request.key, request.completion(reason)))
        return done
