r"""MATH: competition problems whose answer is an expression in `\boxed{}` (Hendrycks et al. 2021, arXiv:2103.03874).

Reads a hub copy, or a local folder or file with columns `problem` and `solution`, `--dataset.path`. Answers are
compared by math-verify: equal values and equivalent expressions count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import msgspec

from asyncrl.config import DatasetConfig
from asyncrl.data import for_evaluation, num_rows, rows
from asyncrl.env import Env
from asyncrl.registry import register_env
from asyncrl.rewards.answers import boxed
from asyncrl.rewards.math import MathReward
from asyncrl.types import Message, Prompt

INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."


def default_dataset() -> DatasetConfig:
    return DatasetConfig(
        path="DigitalLearningGmbH/MATH-lighteval",
        split="train",
        eval_split="test",
        prompt_key="problem",
        answer_key="solution",
    )


@register_env("math")
class Math(Env):
    """Competition mathematics with an answer in a box, compared symbolically."""

    dataset: DatasetConfig = msgspec.field(default_factory=default_dataset)
    """What to read; the `dataset` section of the configuration sets it."""
    style: Literal["chat", "plain"] = "chat"
    """`chat`: a user message with an instruction; `plain`: Problem and Solution, for base models."""
    format_reward: float = 0.0
    """Reward for an answer in a box that is wrong."""
    tolerance: float = 0.0
    """Relative difference up to which two numbers count as equal."""

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for row in rows(self.dataset, seed=self.seed, start=start):
            answer = boxed(str(row.answer)) or str(row.answer)
            yield Prompt(id=row.position, prompt=self._ask(str(row.prompt)), target=answer)

    def epoch_prompts(self) -> int | None:
        return num_rows(self.dataset)

    def score(self, text: str, prompt: Prompt) -> dict[str, float]:
        return self._reward("", text, prompt.target)

    def reference(self, prompt: Prompt) -> str:
        return f"\\boxed{{{prompt.target}}}"

    def evaluation(self) -> Env:
        return msgspec.structs.replace(self, dataset=for_evaluation(self.dataset))

    @cached_property
    def _reward(self) -> MathReward:
        return MathReward(format_reward=self.format_reward, tolerance=self.tolerance)

    def _ask(self, problem: str) -> str | list[Message]:
        if self.style == "plain":
            return f"Problem: {problem}\nSolution:"
        return [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}]
