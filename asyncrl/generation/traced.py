"""An engine whose work shows in the run's trace: when it sampled, and when weights arrived.

`generator.py` wraps its engine in this; whoever uses the engine sees no difference. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.generation.engine import Engine
from asyncrl.metrics import Timer
from asyncrl.types import Completion, SamplingParams
from asyncrl.weights.messages import JoinSpec, PlanSpec


class Traced:
    """Implements `engine.Engine` by another one."""

    def __init__(self, engine: Engine, timer: Timer) -> None:
        self._engine, self._timer = engine, timer
        self._running, self._since = 0, 0.0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def num_weight_ranks(self) -> int:
        return self._engine.num_weight_ranks

    async def start(self) -> None:
        with self._timer("start"):
            await self._engine.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1
        try:
            return await self._engine.generate(prompt_ids, params)
        finally:
            self._running -= 1
            if not self._running:
                self._sampled()

    async def join_weights(self, spec: JoinSpec) -> None:
        await self._engine.join_weights(spec)

    async def receive_weights(self, plan: PlanSpec) -> list[int]:
        if self._running:  # a span per version: sampling that never stops would otherwise be one that never ends
            self._sampled()
        with self._timer("weights"):
            return await self._engine.receive_weights(plan)

    async def commit_weights(self, version: int) -> None:
        with self._timer("commit", version=version):
            await self._engine.commit_weights(version)

    async def discard_weights(self) -> None:
        await self._engine.discard_weights()

    def activity(self) -> dict[str, float]:
        return self._engine.activity()

    async def close(self) -> None:
        await self._engine.close()
        self._timer.close()

    def _sampled(self) -> None:
        now = time.perf_counter()
        self._timer.add("generate", self._since, now, version=self._engine.version)
        self._since = now
