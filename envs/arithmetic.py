"""Arithmetic with integers: `12+7=` -> `19`, or the same as a chat question with the answer in tags.

Plain text suits models that were built on the spot and base models; `style: chat` suits instruct models, and
`style: bare` small ones that cannot keep to tags yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

from asyncrl.env import Env, seeded
from asyncrl.registry import register_env
from asyncrl.rewards.answers import calculate, find, last_number
from asyncrl.types import Message, Prompt


@register_env("arithmetic")
class Arithmetic(Env):
    """Sums, differences and products of integers; exact 0/1 reward."""

    operations: str = "+"
    """Which operations occur: any of + - *."""
    digits: int = 2
    """Digits of the first number."""
    other_digits: int = 1
    """Digits of the other numbers."""
    terms: int = 2
    """How many numbers."""
    style: Literal["plain", "chat", "bare"] = "plain"
    """`plain`: text to continue; `chat`: a message, with the answer wanted in <answer> tags; `bare`: a message, with
    the number alone wanted and the last number of the response taken."""

    def __post_init__(self) -> None:
        if not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(f"env.operations must be made of + - *, got {self.operations!r}")
        if min(self.digits, self.other_digits) < 1 or self.terms < 2:
            raise ValueError("env.digits and env.other_digits must be at least 1, env.terms at least 2")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            sum_ = self._expression("prompt", index)
            yield Prompt(id=index, prompt=self._ask(sum_), target=str(calculate(sum_)[0]))

    def score(self, text: str, prompt: Prompt) -> float:
        read: dict[str, Callable[[str], str | None]] = {"plain": str, "chat": find, "bare": last_number}
        answer = read[self.style](text)
        return float(answer is not None and answer.strip() == prompt.target)

    def reference(self, prompt: Prompt) -> str:
        return self._answer(prompt.target)

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        for index in count(start):  # the answers belong to other questions: the format alone
            other = calculate(self._expression("other", index))[0]
            yield self._ask(self._expression("demonstration", index)), self._answer(str(other))

    def _answer(self, value: str) -> str:
        return f"<answer>{value}</answer>" if self.style == "chat" else value

    def _ask(self, sum_: str) -> str | list[Message]:
        if self.style == "plain":
            return f"{sum_}="
        tags, bare = "Give the number in <answer></answer> tags.", "Reply with the number alone."
        wanted = tags if self.style == "chat" else bare
        return [{"role": "user", "content": f"What is {sum_}? {wanted}"}]

    def _expression(self, stream: str, index: int) -> str:
        random = seeded(self.seed, stream, index)
        numbers = [random.randrange(10**d) for d in (self.digits, *[self.other_digits] * (self.terms - 1))]
        parts = [str(numbers[0])] + [random.choice(self.operations) + str(n) for n in numbers[1:]]
        return "".join(parts)
