"""Evaluation during a run: every `eval.every` versions, beside the rollouts, without stopping anything.

Generator 0 runs it as one task. It shares the engine with the rollouts and takes at most a quarter of its room. Weights
go on changing meanwhile, so a figure belongs to the version that was live when the evaluation began; the versions that
really sampled are written with it. Results go to eval/ and, a line each, to eval.jsonl, where the trainer's metrics
pick them up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

from asyncrl.chat import Chat
from asyncrl.generation.engine import Engine
from asyncrl.generation.evaluation import (
    Response,
    evaluate,
    failures,
    for_evaluation,
    make_generate,
    summarise,
    write_responses,
)
from asyncrl.generation.rewards import RewardPool
from asyncrl.settings import Run

log = logging.getLogger(__name__)
SHARE = 4
"""One request in this many may be an evaluation's."""


class PeriodicEvaluation:
    """`due(version)` says that a version serves; `run()` evaluates what is due, the newest when several are."""

    def __init__(self, run: Run, *, engine: Engine, chat: Chat) -> None:
        self._parent, self._engine, self._chat = run, engine, chat
        self._every = run.config.eval.every
        self._due: int | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def due(self, version: int) -> None:
        """Called at each new version: only those that `eval.every` divides count."""
        if self._every and version % self._every == 0:
            self._due = version
            self._changed.set()

    async def run(self) -> None:
        """Consumes due versions; waits for the next; is unblocked by `due`; produces lines of eval.jsonl. Endless."""
        run = for_evaluation(self._parent, self._parent.dir / "eval")
        config = run.config
        pool = RewardPool(
            run.dir,
            num_workers=1,
            timeout_s=config.generation.reward_timeout_s,
            start_timeout_s=config.supervise.start_timeout_s,
        )
        try:
            await pool.start()
            while True:
                await self._changed.wait()
                self._changed.clear()
                version, self._due = self._due, None
                assert version is not None
                self._idle.clear()
                await self._evaluate(run, pool, version)
                if self._due is None:
                    self._idle.set()
        finally:
            await pool.close()

    async def finish(self, timeout_s: float) -> None:
        """Let an evaluation that runs come to its end, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def _evaluate(self, run: Run, pool: RewardPool, version: int) -> None:
        began, config = time.monotonic(), run.config
        responses = await evaluate(
            run.env,
            make_generate(run, self._engine, self._chat, pool.score),
            num_prompts=config.eval.num_prompts,
            n=config.eval.n,
            concurrency=max(1, config.generation.max_concurrency // SHARE),
            timeout_s=config.generation.rollout_timeout_s,
        )
        write_responses(str(run.dir / f"responses-{version:06d}.jsonl"), responses)
        row = _row(run, responses, version) | {"eval/seconds": time.monotonic() - began}
        with open(self._parent.dir / "eval.jsonl", "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        log.info("evaluation at version %d: %s", version, row)


def _row(run: Run, responses: list[Response], version: int) -> dict[str, float]:
    sampled = [r for r in responses if not r.failed]
    row = {"eval/version": float(version), "eval/failed": float(sum(failures(responses).values()))}
    if sampled:
        row["eval/first_version"] = float(min(r.first_version for r in sampled))
        row["eval/last_version"] = float(max(r.last_version for r in sampled))
    for name, estimate in summarise(responses, full_marks=run.env.full_marks).items():
        row[f"eval/{name}"] = estimate.mean
        row[f"eval/{name}_half_width"] = estimate.half_width
    return row
