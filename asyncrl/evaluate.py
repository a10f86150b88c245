"""`asyncrl eval`: one model on one environment, without a trainer: avg@n and pass@k with confidence intervals.

    asyncrl eval --model PATH --env NAME --n 8
    asyncrl eval runs/demo                        what that run has trained, on its own environment

Uses the local engine with the model's weights, and reward workers like a generator's. It writes the responses beside
the figures, as a run folder of its own.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import settings
from asyncrl.chat import Chat
from asyncrl.generation.evaluation import (
    Estimate,
    Response,
    evaluate,
    failures,
    for_evaluation,
    make_generate,
    summarise,
    write_responses,
)
from asyncrl.generation.local import LocalEngine
from asyncrl.generation.rewards import RewardPool
from asyncrl.launch import make_folder
from asyncrl.model_check import check_model
from asyncrl.models import load_tokenizer
from asyncrl.settings import Run


def of_trained(run_dir: str, overrides: Mapping[str, Any]) -> Run:
    """The run in that folder, with the model it has trained. Raises ValueError when there is none."""
    model = Path(run_dir) / "model"
    if not model.exists():
        raise ValueError(
            f"{run_dir} holds no trained model (model/): the run has not finished, or checkpoint.export is off"
        )
    fresh = {"eval.temperature": None}  # the run's own was resolved for its own eval.n
    keys = {**fresh, **overrides, "model.path": str(model), "run_dir": str(run_dir)}
    run = settings.resolve(settings.load(Path(run_dir) / "config.yaml", keys))  # no resume: any key may change
    return Run(
        config=msgspec.structs.replace(run.config, run_dir=str(Path(run_dir) / "eval")), algo=run.algo, env=run.env
    )


def evaluate_run(run: Run) -> int:
    """Evaluate, print, write; returns an exit code: 1 when not a single response got a reward."""
    check_model(run.config.model.path)
    make_folder(Path(str(run.config.run_dir)))
    run = for_evaluation(run, Path(str(run.config.run_dir)))
    run.env.check()
    started = time.monotonic()
    responses = asyncio.run(_evaluate(run))
    estimates = summarise(responses, full_marks=run.env.full_marks)
    _keep_former(run.dir)
    write_responses(str(run.dir / "responses.jsonl"), responses)
    figures = {name: {"mean": e.mean, "half_width": e.half_width} for name, e in estimates.items()}
    (run.dir / "eval.json").write_bytes(msgspec.json.encode(figures) + b"\n")
    print("\n".join(_report(run, responses, estimates, time.monotonic() - started)))
    return 1 if all(response.failed for response in responses) else 0


def _keep_former(folder: Path) -> None:
    """What an earlier evaluation left becomes eval.000.json and responses.000.jsonl, then 001, ..."""
    number = len(list(folder.glob("eval.*.json")))
    for name, suffix in (("responses", "jsonl"), ("eval", "json")):
        if (path := folder / f"{name}.{suffix}").exists():
            path.rename(folder / f"{name}.{number:03}.{suffix}")


async def _evaluate(run: Run) -> list[Response]:
    config = run.config
    engine = LocalEngine.with_weights(config)
    rewards = RewardPool(
        run.dir,
        num_workers=config.generation.reward_workers,
        timeout_s=config.generation.reward_timeout_s,
        start_timeout_s=config.supervise.start_timeout_s,
    )
    try:
        await asyncio.gather(engine.start(), rewards.start())
        return await evaluate(
            run.env,
            make_generate(run, engine, Chat.of(config, load_tokenizer(config.model.path)), rewards.score),
            num_prompts=config.eval.num_prompts,
            n=config.eval.n,
            concurrency=config.generation.max_concurrency,
            timeout_s=config.generation.rollout_timeout_s,
            on_response=_Progress(config.eval.num_prompts * config.eval.n),
        )
    finally:
        await rewards.close()
        await engine.close()


class _Progress:
    """A line on the terminal that counts; nothing where there is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, response: Response) -> None:
        self.done += 1
        if sys.stderr.isatty():
            print(
                f"\r{self.done} of {self.total} responses", end="" if self.done < self.total else "\n", file=sys.stderr
            )


def _report(run: Run, responses: list[Response], estimates: dict[str, Estimate], seconds: float) -> list[str]:
    prompts = len({response.prompt for response in responses})
    head = f"{run.config.env['name']}: {prompts} prompts x {run.config.eval.n} responses of {run.config.model.path}"
    lines = [
        f"{head}, temperature {run.config.eval.temperature:g}, {seconds:.0f} s; means with 95 % intervals over prompts"
    ]
    width = max(map(len, estimates))
    lines += [f"  {name:<{width}}  {estimate}" for name, estimate in estimates.items()]
    lines += [f"  {count} responses without a reward: {reason}" for reason, count in failures(responses).items()]
    return [*lines, f"responses: {run.dir / 'responses.jsonl'}"]
