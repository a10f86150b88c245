"""Guess a hidden number in several turns; the environment answers `higher` or `lower`. The smallest multi-turn task.

Each guess is sampled and trained; each answer is shown and masked. The reward is 1 for the number, less a little for
each guess above what bisection needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import ceil, log2
from typing import Any, ClassVar, Literal

from asyncrl.env import Conversation, Env, Generate, seeded
from asyncrl.registry import register_env
from asyncrl.rewards.answers import last_number
from asyncrl.types import Episode, Message, Prompt


@register_env("number_guessing")
class NumberGuessing(Env):
    """Find a hidden number in several turns with higher and lower as answers."""

    tiny: ClassVar[dict[str, Any]] = {"training": {"seq_len": 128}}

    largest: int = 15
    """The number lies between 1 and this."""
    max_turns: int | None = None
    """Guesses allowed; none: as many as bisection needs, and one more."""
    turn_cost: float = 0.1
    """Taken from the reward of 1 for each guess beyond what bisection needs."""
    style: Literal["plain", "chat"] = "plain"
    """`plain`: bare text; `chat`: messages."""

    def __post_init__(self) -> None:
        if self.largest < 2:
            raise ValueError(f"env.largest must be at least 2, got {self.largest}")
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"env.max_turns must be at least 1, got {self.max_turns}")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            hidden = seeded(self.seed, "prompt", index).randint(1, self.largest)
            yield Prompt(id=index, prompt=self._ask(), target=hidden)

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        talk = Conversation(generate, prompt.prompt)
        for turn in range(1, self._turns + 1):
            guess = _number((await talk.generate()).text)
            if guess == prompt.target:
                return talk.episode(self._reward(turn), guesses=turn)
            if talk.truncated:
                break
            talk.reply(self._answer(guess, prompt.target))
        return talk.episode(0.0, guesses=self._turns)

    def reference(self, prompt: Prompt) -> list[str]:
        """Bisection."""
        guesses: list[int] = []
        low, high = 1, self.largest
        while not guesses or guesses[-1] != prompt.target:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < prompt.target else (low, guesses[-1] - 1)
        return [str(guess) for guess in guesses]

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        for index in count(start):  # any number: the format of a first guess
            yield self._ask(), str(seeded(self.seed, "demonstration", index).randint(1, self.largest))

    @property
    def _bisection(self) -> int:
        return ceil(log2(self.largest + 1))

    @property
    def _turns(self) -> int:
        return self.max_turns if self.max_turns is not None else self._bisection + 1

    def _reward(self, turns: int) -> float:
        return max(0.0, 1.0 - self.turn_cost * max(0, turns - self._bisection))

    def _ask(self) -> str | list[Message]:
        if self.style == "plain":
            return f"guess 1-{self.largest}:"
        text = (
            f"I am thinking of a number between 1 and {self.largest}. Guess it: reply with one number. "
            "I will tell you whether mine is higher or lower."
        )
        return [{"role": "user", "content": text}]

    def _answer(self, guess: int | None, hidden: int) -> str:
        if guess is None:
            word = "?" if self.style == "plain" else "That was not a number."
        else:
            word = "higher" if hidden > guess else "lower"
        return f" {word}:" if self.style == "plain" else word


def _number(text: str) -> int | None:
    found = last_number(text)
    return int(found) if found is not None and found.lstrip("+-").isdigit() and len(found) < 10 else None
