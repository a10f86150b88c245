"""What `asyncrl envs` prints: a table, a page for one, and a check that an environment's own answers earn full marks.

Called by `cli.py`. Summaries and keys are the code's own docstrings and fields.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

from asyncrl import help as pages
from asyncrl.env import Env
from asyncrl.registry import ENVS

CHECKED_PROMPTS = 50


def table() -> list[dict[str, str]]:
    """One row per environment: name and summary."""
    return [{"name": name, "what it is": _summary(cls)} for name, cls in ENVS.all().items()]


def page(name: str) -> str:
    """What it is, and every key with its default. Raises ValueError for an unknown name."""
    cls = ENVS.get(name)
    module = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    return "\n\n".join([f"{name}: {_summary(cls)}", module, "\n".join(["Keys", *pages.entries(cls, "env")])]) + "\n"


def check(env: Env, name: str) -> int:
    """Play the environment's own reference answers against it; prints what failed. Returns an exit code."""
    env.check()
    prompts = list(islice(env.prompts(), CHECKED_PROMPTS))
    known = [(p, answer) for p in prompts if (answer := env.reference(p)) is not None]
    if not known:
        print(f"{name}: {len(prompts)} prompts can be made; it knows no reference answers, so rewards are unchecked")
        return 0
    rewards = asyncio.run(_play(env, known))
    bad = [(p, a, r) for (p, a), r in zip(known, rewards, strict=True) if r < env.full_marks]
    for prompt, answer, reward in bad[:3]:
        print(f"{name}: prompt {prompt.id}: its own answer {answer!r} earns {reward:g}, not {env.full_marks:g}")
    print(f"{name}: {len(known) - len(bad)} of {len(known)} reference answers earn full marks")
    return 1 if bad else 0


async def _play(env: Env, known: list[tuple[Any, Any]]) -> list[float]:
    from asyncrl.scripted import Scripted

    return [(await env.rollout(prompt, Scripted(env, answer))).reward for prompt, answer in known]


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def build(name: str, overrides: Mapping[str, Any]) -> Env:
    """The environment with `--env.key value` overrides applied."""
    from asyncrl.settings import load, resolve

    return resolve(load(None, {**overrides, "env.name": name})).env
