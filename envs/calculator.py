"""Arithmetic with a tool: the model may call a calculator before it answers. Multi-turn, the tool's output masked.

A reply that contains `<calc>12*34</calc>` is a call; the environment answers `<result>408</result>`. A reply with
`<answer>...</answer>` ends the episode. The numbers are too large to multiply in the head of a small model, so the tool
pays. The reward has two named parts, for the answer and (optionally) for having used the tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from asyncrl.env import Conversation, Env, Generate, seeded
from asyncrl.registry import register_env
from asyncrl.rewards.answers import calculate, tagged
from asyncrl.rewards.math import number
from asyncrl.types import Episode, Message, Prompt

INSTRUCTION = (
    "You have a calculator: write <calc>expression</calc> with + - * / and parentheses, and stop; its result comes in "
    "<result></result>. When you know the answer, write it in <answer></answer>."
)


@register_env("calculator")
class Calculator(Env):
    """Arithmetic word problems with a calculator tool, in several turns."""

    tiny: ClassVar[dict[str, Any]] = {
        "training": {"seq_len": 1024, "warmup_sft_steps": 40},
        "generation": {"max_tokens": 64},
    }

    digits: int = 3
    """Digits of the numbers."""
    max_calls: int = 3
    """Calls of the tool that are answered."""
    tool_reward: float = 0.0
    """Extra reward for a right answer that used the tool."""

    def __post_init__(self) -> None:
        if self.digits < 1 or self.max_calls < 1:
            raise ValueError("env.digits and env.max_calls must be at least 1")

    @property
    def full_marks(self) -> float:  # type: ignore[override]
        """A right answer that used the tool."""
        return 1.0 + self.tool_reward

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            random = seeded(self.seed, "prompt", index)
            each, boxes, lost = (random.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(3))
            expression = f"{each}*{boxes}-{lost}"
            question = f"There are {boxes} boxes of {each} screws each, and {lost} screws are lost. How many are left?"
            messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
            target = str(calculate(expression)[0])
            yield Prompt(id=index, prompt=messages, target=target, metadata={"expression": expression})

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        talk = Conversation(generate, prompt.prompt)
        calls = 0
        while True:
            text = (await talk.generate()).text
            call = tagged(text, "calc")
            answered = tagged(text) is not None
            if answered or call is None or calls == self.max_calls or talk.truncated:
                break
            calls += 1
            talk.reply(f"<result>{_result(call)}</result>")
        return talk.episode(self._score(text, prompt, calls), calls=calls)

    def reference(self, prompt: Prompt) -> list[str]:
        return [f"<calc>{prompt.metadata['expression']}</calc>", f"<answer>{prompt.target}</answer>"]

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        for prompt in self.prompts(start):  # a call for another problem: the format alone
            other = next(self.prompts(prompt.id + 7)).metadata["expression"]
            yield prompt.prompt, f"<calc>{other}</calc>"

    def _score(self, text: str, prompt: Prompt, calls: int) -> dict[str, float]:
        answer = number(tagged(text) or "")
        correct = float(answer is not None and answer == number(prompt.target))
        score = {"correct": correct}
        if self.tool_reward:
            score["tool"] = self.tool_reward * correct * bool(calls)
        return score


def _result(expression: str) -> str:
    """What the tool says; an error in words is an answer too, and the model may try again."""
    try:
        value, _ = calculate(expression)
    except ValueError as error:
        return f"error: {error}"
    return str(value) if value.denominator == 1 else f"{float(value):g}"
