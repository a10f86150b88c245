"""GSM8K: grade-school word problems whose answer is a number (Cobbe et al. 2021, arXiv:2110.14168).

Reads `openai/gsm8k` from the hub, or a local folder or file of the same columns with `--dataset.path`. The reference
answer stands after `####`; a response may give its own there, in a box or in tags.
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
from asyncrl.rewards.answers import after_marker
from asyncrl.rewards.math import MathReward
from asyncrl.types import Message, Prompt

INSTRUCTION = "Reason step by step, then give the final number on a last line as #### number."


def default_dataset() -> DatasetConfig:
    return DatasetConfig(
        path="openai/gsm8k", name="main", split="train", eval_split="test", prompt_key="question", answer_key="answer"
    )


@register_env("gsm8k")
class GSM8K(Env):
    """Grade-school word problems with a numeric answer."""

    dataset: DatasetConfig = msgspec.field(default_factory=default_dataset)
    """What to read; the `dataset` section of the configuration sets it."""
    style: Literal["chat", "plain"] = "chat"
    """`chat`: a user message with an instruction; `plain`: Question and Answer, for base models."""
    format_reward: float = 0.0
    """Reward for an answer in the asked format that is wrong."""
    last_number: bool = False
    """Take the last number of a response that marks no answer."""

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for row in rows(self.dataset, seed=self.seed, start=start):
            answer = after_marker(str(row.answer)) or str(row.answer)
            yield Prompt(
                id=row.position,
                prompt=self._ask(row.prompt),
                target=answer.replace(",", ""),
                metadata={"solution": str(row.answer)},
            )

    def epoch_prompts(self) -> int | None:
        return num_rows(self.dataset)

    def score(self, text: str, prompt: Prompt) -> dict[str, float]:
        return self._reward("", text, prompt.target)

    def reference(self, prompt: Prompt) -> str:
        return prompt.metadata["solution"]

    def evaluation(self) -> Env:
        return msgspec.structs.replace(self, dataset=for_evaluation(self.dataset))

    @cached_property
    def _reward(self) -> MathReward:
        return MathReward(format_reward=self.format_reward, last_number=self.last_number)

    def _ask(self, question: str) -> str | list[Message]:
        if self.style == "plain":
            return f"Question: {question}\nAnswer:"
        return [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
