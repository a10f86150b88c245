"""Countdown: reach a number from others with + - * /, each used exactly once. `make 24 from 3 8 1=` -> `3*8*1`.

The task that small reasoning replications made popular. Every problem has a solution, because it is made from one. The
checker computes with exact fractions; it never evaluates text as code.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Literal

from asyncrl.env import Env, seeded
from asyncrl.registry import register_env
from asyncrl.rewards.answers import calculate, find
from asyncrl.types import Message, Prompt


@register_env("countdown")
class Countdown(Env):
    """Reach a number from others with + - * /, each used once; exact reward and a part for the format."""

    numbers: int = 3
    """How many numbers there are."""
    largest: int = 20
    """Numbers lie between 1 and this."""
    largest_target: int = 200
    """The target lies between 1 and this."""
    format_reward: float = 0.0
    """Reward for a valid expression with the right numbers and a wrong value."""
    style: Literal["plain", "chat"] = "plain"
    """`plain`: bare text; `chat`: a message that allows thinking, with the answer wanted in <answer> tags."""

    def __post_init__(self) -> None:
        if self.numbers < 2 or self.largest < 1 or self.largest_target < 1:
            raise ValueError("env.numbers must be at least 2, env.largest and env.largest_target at least 1")
        if not 0 <= self.format_reward <= 1:
            raise ValueError(f"env.format_reward must be in [0, 1], got {self.format_reward}")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            numbers, goal, solution = self._problem("prompt", index)
            metadata = {"numbers": numbers, "solution": solution}
            yield Prompt(id=index, prompt=self._ask(numbers, goal), target=goal, metadata=metadata)

    def score(self, text: str, prompt: Prompt) -> float:
        expression = text if self.style == "plain" else find(text)
        try:
            value, used = calculate((expression or "").split("=")[0])
        except ValueError:
            return 0.0
        if sorted(used) != sorted(prompt.metadata["numbers"]):
            return 0.0
        return 1.0 if value == prompt.target else self.format_reward

    def reference(self, prompt: Prompt) -> str:
        return self._answer(prompt.metadata["solution"])

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        for index in count(start):
            numbers, goal, _ = self._problem("demonstration", index)
            yield self._ask(numbers, goal), self._answer(_any_expression(numbers, seeded(self.seed, "any", index)))

    def _answer(self, expression: str) -> str:
        return expression if self.style == "plain" else f"<answer>{expression}</answer>"

    def _ask(self, numbers: list[int], goal: int) -> str | list[Message]:
        listed = " ".join(map(str, numbers))
        if self.style == "plain":
            return f"make {goal} from {listed}="
        text = (
            f"Using the numbers {listed}, each exactly once, and + - * / with parentheses, write an expression that "
            f"equals {goal}. Think first, then give the expression in <answer></answer> tags, for example "
            "<answer>(1+2)*3</answer>."
        )
        return [{"role": "user", "content": text}]

    def _problem(self, stream: str, index: int) -> tuple[list[int], int, str]:
        """Numbers, target and a solution: random expressions until one has an allowed value."""
        random = seeded(self.seed, stream, index)
        for _ in range(1000):
            numbers = [random.randint(1, self.largest) for _ in range(self.numbers)]
            solution = _any_expression(numbers, random)
            try:
                value, _ = calculate(solution)
            except ValueError:  # a division by zero
                continue
            if value.denominator == 1 and 1 <= value <= self.largest_target:
                return numbers, int(value), solution
        raise ValueError(f"no problem with env.largest_target {self.largest_target} was found; raise it")


def _any_expression(numbers: list[int], random: Random) -> str:
    """A random expression that uses each number once: combine two at random until one is left."""
    parts = [str(n) for n in numbers]
    while len(parts) > 1:
        left = parts.pop(random.randrange(len(parts)))
        right = parts.pop(random.randrange(len(parts)))
        operation = random.choice("+-*/")
        parts.append(f"({left}{operation}{right})" if parts else f"{left}{operation}{right}")
    return parts[0]
