"""An environment whose prompts say how their reward, or their rollout, misbehaves; every process imports it by path."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np

from asyncrl.env import Env
from asyncrl.registry import register_env
from asyncrl.types import Episode, Prompt


class Mute(Exception):
    """One that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


@register_env("moods")
class Moods(Env):
    """Prompt number i is of kind `kinds[i % len(kinds)]`."""

    kinds: list[str] = msgspec.field(default_factory=list)

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for i in count(start):
            kind = self.kinds[i % len(self.kinds)]
            yield Prompt(id=i, prompt=f"{kind}{i}=" + ("x" * 60 if kind == "long" else ""), metadata={"kind": kind})

    def score(self, text: str, prompt: Prompt):
        kind = prompt.metadata["kind"]
        match kind:
            case "hang":
                re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock for ever
            case "crash":
                os._exit(7)
            case "raise":
                raise KeyError("no such answer")
            case "print":
                print("to stdout, which carries the answers")
                print(sys.stdin.read())
            case "async":
                return self.later(len(text))
            case "named":
                return {"half": 0.5, "quarter": np.float32(0.25)}
        return {"nan": float("nan"), "text": "1.0", "none": None}.get(kind, float(len(text) % 2))

    async def later(self, value: int) -> float:
        await asyncio.sleep(0)
        return float(value)

    async def rollout(self, prompt: Prompt, generate) -> Episode:
        match prompt.metadata["kind"]:
            case "garbled":
                raise ValueError("half a character: \udc80")
            case "mute":
                raise Mute
            case "explode":
                raise ZeroDivisionError("in the rollout")
            case "slow":
                await asyncio.sleep(3600)
            case "nothing":
                return None  # type: ignore[return-value]
            case "impatient":
                raise TimeoutError("the environment's own")
        episode = await super().rollout(prompt, generate)
        if prompt.metadata["kind"] == "crooked":
            episode.logprobs = episode.logprobs[:-1]
        if prompt.metadata["kind"] == "object":
            episode.metadata["x"] = object()
        return episode
