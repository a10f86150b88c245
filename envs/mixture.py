"""Several environments with weights: `--env countdown:0.7,arithmetic:0.3`. A weight left out is 1.

Each component is a section of its own, `--env.countdown.numbers 4`. Proportions are exact over each block of a thousand
prompts, in an order that the seed decides, so that any position is resumed at once. A mixture ends when one of its
environments ends.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from asyncrl.env import Env, Generate, Score, seeded
from asyncrl.registry import ENVS, register_env
from asyncrl.types import Episode, Prompt

BLOCK = 1000


@register_env("mixture")
class Mixture(Env):
    """Several environments with weights, by name: a:0.7,b:0.3."""

    weights: ClassVar[dict[str, float]] = {}
    """Field name of each component -> weight."""

    @classmethod
    def parametrised(cls, text: str) -> type[Mixture]:
        """The class for `a:0.7,b:0.3`: a Mixture with a field per component. Raises ValueError for a bad weight."""
        fields, weights = [], {}
        tiny: dict[str, Any] = {}
        for part in text.split(","):
            name, weight = _name_and_weight(part.strip())
            field = re.sub(r"\W+", "_", name).strip("_")
            if field in weights or field == "seed":
                raise ValueError(f"environment {name!r} is twice in the mixture {text!r}; add up its weights")
            component: type[Env] = ENVS.get(name)
            fields.append((field, component, msgspec.field(default_factory=component)))
            weights[field], tiny = weight, _larger(tiny, component.tiny)
        own = {"weights": weights, "tiny": tiny}
        made = msgspec.defstruct("Mixture", fields, bases=(cls,), namespace=own, kw_only=True)
        made.__doc__ = f"A mixture of {text}."
        return made  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("a mixture is named by its parts: --env countdown:0.7,arithmetic:0.3")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        streams = {name: self._component(name).prompts(done) for name, done in self._done(start).items()}
        index = start
        while True:
            for name in self._block(index // BLOCK)[index % BLOCK :]:
                inner = next(streams[name], None)
                if inner is None:
                    return
                metadata = {**inner.metadata, "env": name, "env_id": inner.id}
                yield msgspec.structs.replace(inner, id=index, metadata=metadata)
                index += 1

    def score(self, text: str, prompt: Prompt) -> Score | Awaitable[Score]:
        return self._of(prompt).score(text, _inner(prompt))

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        episode = await self._of(prompt).rollout(_inner(prompt), generate)
        name = prompt.metadata["env"]
        parts = {f"{name}/{part}": value for part, value in episode.rewards.items()}
        episode.rewards = parts or {name: episode.reward}
        episode.metadata["env"] = name
        return episode

    def score_group(self, episodes: list[Episode], prompt: Prompt) -> list[Episode]:
        return self._of(prompt).score_group(episodes, _inner(prompt))

    def reference(self, prompt: Prompt) -> str | list[str] | None:
        return self._of(prompt).reference(_inner(prompt))

    def check(self) -> None:
        for name in self.weights:
            self._component(name).check()

    def evaluation(self) -> Env:
        return msgspec.structs.replace(self, **{name: self._component(name).evaluation() for name in self.weights})

    def demonstrations(self, start: int = 0) -> Iterator[tuple[Any, str]]:
        streams = {name: self._component(name).demonstrations(done) for name, done in self._done(start).items()}
        index = start
        while (shown := next(streams[self._block(index // BLOCK)[index % BLOCK]], None)) is not None:
            yield shown
            index += 1

    @cached_property
    def _counts(self) -> dict[str, int]:
        """Prompts of each component in a block: proportional, the remainders to the largest fractions."""
        total = sum(self.weights.values())
        exact = {name: BLOCK * weight / total for name, weight in self.weights.items()}
        counts = {name: int(share) for name, share in exact.items()}
        left = BLOCK - sum(counts.values())
        for name in sorted(exact, key=lambda n: counts[n] - exact[n])[:left]:
            counts[name] += 1
        return counts

    def _block(self, number: int) -> list[str]:
        names = [name for name, times in self._counts.items() for _ in range(times)]
        seeded(self.seed, "mixture", number).shuffle(names)
        return names

    def _done(self, start: int) -> dict[str, int]:
        """How many prompts of each component come before position `start`."""
        partial = self._block(start // BLOCK)[: start % BLOCK]
        return {name: start // BLOCK * times + partial.count(name) for name, times in self._counts.items()}

    @cached_property
    def _components(self) -> dict[str, Env]:
        parts = {name: getattr(self, name) for name in self.weights}
        return {name: msgspec.structs.replace(env, seed=env.seed + self.seed) for name, env in parts.items()}

    def _component(self, name: str) -> Env:
        return self._components[name]

    def _of(self, prompt: Prompt) -> Env:
        return self._component(prompt.metadata["env"])


def _inner(prompt: Prompt) -> Prompt:
    """The prompt as its own environment made it, but for two more entries of metadata. Idempotent."""
    return msgspec.structs.replace(prompt, id=prompt.metadata["env_id"])


def _name_and_weight(part: str) -> tuple[str, float]:
    name, colon, text = part.rpartition(":")
    try:
        weight = float(text) if colon else 1.0
    except ValueError:  # the colon belongs to the name: reasoning_gym:chain_sum
        return part, 1.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"the weight of environment {name!r} must be positive, got {text}")
    return (name or part), weight


def _larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Sections of keys that suit both: of two numbers the larger, so that the longest component fits."""
    merged = dict(one)
    for key, value in other.items():
        known = merged.get(key, value)
        merged[key] = _larger(known, value) if isinstance(value, dict) else max(known, value)
    return merged
