"""Your own data with a reward by name: `--env dataset --dataset.path my.jsonl --env.reward math`.

A row's prompt is text or a list of chat messages; its answer is what the reward compares with; its completion, or the
last of its messages, is what `asyncrl sft` learns from. Rewards are those of
`asyncrl.rewards`, with weights when there are several, or any function `my_pkg.my_module:my_function` of (prompt,
response, target).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import msgspec

from asyncrl.config import DatasetConfig
from asyncrl.data import for_demonstrations, for_evaluation, num_rows, rows
from asyncrl.env import Env, Score
from asyncrl.registry import register_env
from asyncrl.rewards import Reward, reward_from
from asyncrl.types import Message, Prompt

PROMPT = "question"


def default_dataset() -> DatasetConfig:
    return DatasetConfig(split="train", prompt_key=PROMPT, answer_key="answer")


@register_env("dataset")
class Dataset(Env):
    """Prompts and answers from your own files or the hub, with a reward by name; or responses, to learn from."""

    tiny: ClassVar[dict[str, Any]] = {"training": {"warmup_sft_steps": 0}}
    """Not all data holds responses: a warm-up on them is asked for."""

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
        for row in rows(self._asked, seed=self.seed, start=start):
            yield Prompt(id=row.position, prompt=self._ask(row.prompt), target=row.answer)

    def epoch_prompts(self) -> int | None:
        return num_rows(self._asked)

    def score(self, text: str, prompt: Prompt) -> Score | Awaitable[Score]:
        return self._reward(as_text(prompt.prompt), text, prompt.target)

    def check(self) -> None:
        _ = self._reward
        next(self.prompts(), None)

    def evaluation(self) -> Env:
        return msgspec.structs.replace(self, dataset=for_evaluation(self.dataset))

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        """The responses of `dataset.completion_key`, in the order of prompts; as long as `dataset.epochs` says."""
        for row in rows(self._taught, seed=self.seed, start=start):
            *before, reply = _messages(row.completion)
            if self._taught.prompt_key is None:
                yield before, reply["content"]
            else:
                asked = self._ask(row.prompt)
                yield ([*_messages(asked, role="user"), *before] if before else asked), reply["content"]

    def epoch_demonstrations(self) -> int | None:
        return num_rows(self._taught)

    @property
    def _asked(self) -> DatasetConfig:
        """What prompts read: no responses are needed for them."""
        return msgspec.structs.replace(self.dataset, completion_key=None)

    @cached_property
    def _taught(self) -> DatasetConfig:
        key = self.dataset.prompt_key
        return for_demonstrations(self.dataset, prompt_keys=(PROMPT, "prompt") if key in (None, PROMPT) else (key,))

    @cached_property
    def _reward(self) -> Reward:
        return reward_from(self.reward)

    def _ask(self, prompt: Any) -> str | list[Message]:
        if isinstance(prompt, list):
            return _messages(prompt)
        text = self.template.replace("{prompt}", str(prompt))
        return text if self.style == "plain" else [{"role": "user", "content": text}]


def _messages(value: Any, *, role: str = "assistant") -> list[Message]:
    """Chat messages as they are in a row; anything else as one of `role`."""
    if isinstance(value, list):
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in value]
    return [{"role": role, "content": str(value)}]


def as_text(prompt: str | list[Message]) -> str:
    """A prompt as the text that a reward function sees: the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
