"""Reverse a string of letters: `reverse abcde=` -> `edcba`. The smallest task with a reward in parts.

`partial` gives a tenth of the reward per correct position, which a model that copies already earns now and then.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import count

from asyncrl.env import Env, seeded
from asyncrl.registry import register_env
from asyncrl.types import Prompt


@register_env("token_reversal")
class TokenReversal(Env):
    """Reverse a string of letters; exact reward, or exact and positions."""

    length: int = 5
    """How many letters."""
    alphabet: int = 26
    """How many different letters."""
    partial: float = 0.0
    """The share of the reward that goes to letters in their right place; 0: all or nothing."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"env.length must be at least 1, got {self.length}")
        if not 1 <= self.alphabet <= 26:
            raise ValueError(f"env.alphabet must be from 1 to 26, got {self.alphabet}")
        if not 0 <= self.partial < 1:
            raise ValueError(f"env.partial must be in [0, 1), got {self.partial}")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            letters = self._letters("prompt", index)
            yield Prompt(id=index, prompt=f"reverse {letters}=", target=letters[::-1])

    def score(self, text: str, prompt: Prompt) -> dict[str, float]:
        exact = float(text.strip() == prompt.target)
        if not self.partial:
            return {"exact": exact}
        right = sum(a == b for a, b in zip(text.strip(), prompt.target, strict=False)) / len(prompt.target)
        return {"exact": exact * (1 - self.partial), "positions": right * self.partial}

    def reference(self, prompt: Prompt) -> str:
        return prompt.target

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str, str]]:
        for index in count(start):
            letters = self._letters("demonstration", index)
            yield f"reverse {letters}=", "".join(seeded(self.seed, "shuffle", index).sample(letters, len(letters)))

    def _letters(self, stream: str, index: int) -> str:
        return "".join(seeded(self.seed, stream, index).choices(string.ascii_lowercase[: self.alphabet], k=self.length))
