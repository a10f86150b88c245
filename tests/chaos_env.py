"""An environment for runs that are disturbed: rollouts that last, so that somebody is always at work on a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

from asyncrl.env import Env
from asyncrl.registry import register_env
from asyncrl.types import Episode, Prompt


@register_env("lasting")
class Lasting(Env):
    """Every rollout takes at least `seconds`."""

    seconds: float = 0.3

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for i in count(start):
            yield Prompt(id=i, prompt=f"say {i % 10}=")

    def score(self, text: str, prompt: Prompt) -> float:
        return float(len(text) % 2)

    async def rollout(self, prompt: Prompt, generate) -> Episode:
        await asyncio.sleep(self.seconds)
        return await super().rollout(prompt, generate)
