"""Your own data with a reward by name: `--env dataset --dataset.path my.jsonl --env.reward math`.

A row's prompt is text or a list of chat messages; its answer is what the reward compares with. Rewards are those of
`asyncrl.rewards`, with weights when there are several, or any function `my_pkg.my_module:my_function` of (prompt,
response, target).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from functools import cached_property
from typing import Any, Literal

import msgspec

from asyncrl.config import DatasetConfig
from asyncrl.data import for_evaluation, rows
from asyncrl.env import Env, Score
from asyncrl.registry import register_env
from asyncrl.rewards import Reward, reward_from
from asyncrl.types import Message, Prompt


def default_dataset() -> DatasetConfig:
    return DatasetConfig(split="train", prompt_key="question", answer_key="answer")


@register_env("dataset")
class Dataset(Env):
    """Prompts and answers from your own files or the hub, with a reward by name."""

    dataset: DatasetConfig = msgspec.field(default_factory=default_dataset)
    """What to read; the `dataset` section of the configuration sets it."""
    reward: str | dict[str, float] = "exact"
    """math, exact, contains, thinking, code, regex:PATTERN, my_module:function; or several with weights."""
    style: Literal["chat", "plain"] = "chat"
    """`chat`: a text prompt becomes a user message; `plain`: it is given as it is."""
    template: str = "{prompt}"
    """What a text prompt is put into; {prompt} stands for it."""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError(f"env.template must contain {{prompt}}, got {self.template!r}")

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for row in rows(self.dataset, seed=self.seed, start=start):
            yield Prompt(id=row.position, prompt=self._ask(row.prompt), target=row.answer)

    def score(self, text: str, prompt: Prompt) -> Score | Awaitable[Score]:
        return self._reward(as_text(prompt.prompt), text, prompt.target)

    def check(self) -> None:
        _ = self._reward
        next(self.prompts(), None)

    def evaluation(self) -> Env:
        return msgspec.structs.replace(self, dataset=for_evaluation(self.dataset))

    @cached_property
    def _reward(self) -> Reward:
        return reward_from(self.reward)

    def _ask(self, prompt: Any) -> str | list[Message]:
        if isinstance(prompt, list):
            return [{"role": str(m["role"]), "content": str(m["content"])} for m in prompt]
        text = self.template.replace("{prompt}", str(prompt))
        return text if self.style == "plain" else [{"role": "user", "content": text}]


def as_text(prompt: str | list[Message]) -> str:
    """A prompt as the text that a reward function sees: the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
