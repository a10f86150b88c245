"""The demo's task: sort the digits of a number. `sort 31420=` -> `01234`, reward 1 or 0.

Small enough for a model of a few hundred thousand parameters on one CPU core, hard enough that a random permutation is
right once in a hundred times. The demonstrations are such random permutations: they teach that five digits of the
prompt and a stop come next, and leave the sorting to reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from asyncrl.env import Env, seeded
from asyncrl.registry import register_env
from asyncrl.types import Prompt


@register_env("sort_digits")
class SortDigits(Env):
    """Sort the digits of a number; exact 0/1 reward (the demo)."""

    digits: int = 5
    """How many digits to sort."""

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"env.digits must be at least 1, got {self.digits}")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            digits = self._digits("prompt", index)
            yield Prompt(id=index, prompt=f"sort {digits}=", target="".join(sorted(digits)))

    def score(self, text: str, prompt: Prompt) -> float:
        return float(text.strip() == prompt.target)

    def reference(self, prompt: Prompt) -> str:
        return prompt.target

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str, str]]:
        for index in count(start):
            digits = self._digits("demonstration", index)
            shuffled = seeded(self.seed, "shuffle", index).sample(digits, len(digits))
            yield f"sort {digits}=", "".join(shuffled)

    def _digits(self, stream: str, index: int) -> str:
        return "".join(seeded(self.seed, stream, index).choices("0123456789", k=self.digits))
