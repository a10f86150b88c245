"""How good a policy is: rollouts on an evaluation environment, avg@n and pass@k with confidence intervals.

`asyncrl eval` (evaluate.py) runs it on a model folder; a generator runs it every `eval.every` versions beside its
rollouts (periodic.py). It goes through the same `Env.rollout` as training, trains nothing and asks the replay server
for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from asyncrl import settings
from asyncrl.chat import Chat
from asyncrl.config import DatasetConfig
from asyncrl.env import EVALUATION_SEED, Env, Generate, Score
from asyncrl.generation.engine import Engine, EngineDead
from asyncrl.generation.generate import EngineGenerate, Limits
from asyncrl.settings import Run
from asyncrl.types import NOT_SAMPLED, Prompt

log = logging.getLogger(__name__)
CONFIDENCE = 1.96
"""Standard errors on each side of a mean: 95 %."""

Scorer = Callable[[str, Prompt], Awaitable[Score]]
"""`RewardPool.score`."""

MakeGenerate = Callable[[Prompt, int], Generate]
"""(prompt, sample index) -> what its rollout calls."""


class Response(msgspec.Struct, kw_only=True):
    """One rollout of an evaluation, as it is written to responses.jsonl."""

    prompt: int
    sample: int
    asked: str | list[dict[str, str]]
    target: object
    text: str = ""
    reward: float = 0.0
    rewards: dict[str, float] = {}
    num_tokens: int = 0
    finish_reason: str = ""
    first_version: int = NOT_SAMPLED
    last_version: int = NOT_SAMPLED
    failed: str = ""
    """Why there is no reward; it counts as 0."""


async def evaluate(
    env: Env,
    make_generate: MakeGenerate,
    *,
    num_prompts: int,
    n: int,
    concurrency: int,
    timeout_s: float,
    on_response: Callable[[Response], None] = lambda response: None,
) -> list[Response]:
    """`n` rollouts of each of the first `num_prompts` prompts, `concurrency` at once, in order of prompt and sample.

    A rollout that fails or takes longer than `timeout_s` is a response with reward 0 and the reason. Raises EngineDead.
    """
    room = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt, sample: int) -> Response:
        async with room:
            response = await _respond(env, make_generate(prompt, sample), prompt, sample, timeout_s)
        on_response(response)
        return response

    async with asyncio.TaskGroup() as group:
        prompts = list(islice(env.prompts(), num_prompts))
        tasks = [group.create_task(one(prompt, sample)) for prompt in prompts for sample in range(n)]
    return [task.result() for task in tasks]


async def _respond(env: Env, generate: Generate, prompt: Prompt, sample: int, timeout_s: float) -> Response:
    response = Response(prompt=prompt.id, sample=sample, asked=prompt.prompt, target=prompt.target)
    try:
        async with asyncio.timeout(timeout_s):
            episode = await env.rollout(prompt, generate)
    except EngineDead:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to an environment's code: a failed rollout is a result
        response.failed = f"{type(error).__name__}: {error}"
        return response
    sampled = episode.versions[episode.loss_mask]
    response.text, response.reward, response.rewards = episode.text, float(episode.reward), dict(episode.rewards)
    response.num_tokens, response.finish_reason = len(sampled), episode.finish_reason
    if len(sampled):
        response.first_version, response.last_version = int(sampled.min()), int(sampled.max())
    return response


def make_generate(run: Run, engine: Engine, chat: Chat, scorer: Scorer) -> MakeGenerate:
    """Rollouts of an evaluation: the run's limits, the evaluation's temperature, seeds apart from training's."""
    assert run.config.eval.temperature is not None, "resolve() sets it"
    limits = Limits(
        max_tokens=run.config.generation.max_tokens,
        seq_len=run.config.training.seq_len,
        temperature=run.config.eval.temperature,
    )

    def make(prompt: Prompt, sample: int) -> Generate:
        seed = (EVALUATION_SEED, run.config.seed, prompt.id, sample)
        return EngineGenerate(engine=engine, chat=chat, limits=limits, seed=seed, scorer=scorer)

    return make


def for_evaluation(run: Run, run_dir: Path) -> Run:
    """The run on its evaluation environment, saved as a folder that reward workers can read."""
    if run.config.eval.env is not None:
        config = msgspec.structs.replace(run.config, env={"name": run.config.eval.env}, dataset=DatasetConfig())
        run = settings.resolve(config)
    run = settings.on_env(run, run.env.evaluation(), run_dir=run_dir)
    settings.save(run)
    return run


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts with half the width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def summarise(responses: Sequence[Response], *, full_marks: float) -> dict[str, Estimate]:
    """`avg@n`, `pass@k` for k = 1, 2, 4 ... n, named rewards, and `length`: means over prompts.

    A response is right when it reaches `full_marks`. pass@k is the unbiased estimate of "at least one of k is right"
    (Chen et al. 2021, arXiv:2107.03374, equation 1). Intervals treat prompts as the independent draws, responses to one
    prompt not.
    """
    by_prompt: dict[int, list[Response]] = defaultdict(list)
    for response in responses:
        by_prompt[response.prompt].append(response)
    groups = list(by_prompt.values())
    if not groups:
        raise ValueError("the evaluation environment has no prompts")
    n = min(len(group) for group in groups)
    right = [sum(r.reward >= full_marks - 1e-6 for r in group) for group in groups]
    out = {f"avg@{n}": _estimate([np.mean([r.reward for r in group]) for group in groups])}
    for k in _powers(n):
        out[f"pass@{k}"] = _estimate([pass_at_k(len(g), c, k) for g, c in zip(groups, right, strict=True)])
    for name in sorted({name for r in responses for name in r.rewards}):
        parts = [[r.rewards[name] for r in group if name in r.rewards] for group in groups]
        out[f"reward/{name}"] = _estimate([np.mean(part) for part in parts if part])
    out["length"] = _estimate([np.mean([r.num_tokens for r in group]) for group in groups])
    return out


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k draws without replacement out of n hold one of c right ones."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _powers(n: int) -> list[int]:
    powers = [1 << i for i in range(n.bit_length()) if 1 << i <= n]
    return powers if powers[-1] == n else [*powers, n]


def _estimate(values: Iterable[float | np.floating]) -> Estimate:
    array = np.asarray(list(values), dtype=np.float64)
    if len(set(array.tolist())) == 1 and array[0] in (0.0, 1.0):  # all wrong or all right: the rule of three
        return Estimate(float(array[0]), min(1.0, 3.0 / len(array)))
    spread = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return Estimate(float(array.mean()), CONFIDENCE * spread / math.sqrt(len(array)))


def failures(responses: Sequence[Response]) -> dict[str, int]:
    """Reason -> how many responses failed for it."""
    counts: dict[str, int] = defaultdict(int)
    for response in responses:
        if response.failed:
            counts[response.failed.partition(":")[0]] += 1
    return dict(counts)


def write_responses(path: str, responses: Iterable[Response]) -> None:
    """One JSON object per line."""
    encoder = msgspec.json.Encoder(enc_hook=str)
    with open(path, "wb") as file:
        file.writelines(encoder.encode(response) + b"\n" for response in responses)
