"""Every task of reasoning-gym, with its own scoring: `--env reasoning_gym:chain_sum`.

Tasks are generated without end, in chunks of a hundred with a seed each, so any position is made at once. The answer
is read from <answer></answer> tags (or is the whole response in `style: plain`) and given to the task's own scorer; one
that raises on a malformed answer scores it 0. Known of version 0.1.25: the scorer of `game_of_life_halting` accepts any
text, and some tasks know no reference answer (boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, Literal

import msgspec

from asyncrl.env import Env, variant
from asyncrl.extras import require
from asyncrl.registry import register_env
from asyncrl.rewards.answers import find
from asyncrl.types import Message, Prompt

INSTRUCTION = "Think first if you need to, then give the final answer alone in <answer></answer> tags."
CHUNK = 100


@register_env("reasoning_gym")
class ReasoningGym(Env):
    """A task of reasoning-gym, by name: reasoning_gym:chain_sum."""

    tiny: ClassVar[dict[str, Any]] = {
        "training": {"seq_len": 512, "warmup_sft_steps": 40},
        "generation": {"max_tokens": 48},
    }

    task: str = ""
    """Name of the task; `reasoning_gym:NAME` sets it."""
    style: Literal["chat", "plain"] = "chat"
    """`chat`: a user message, the answer wanted in tags; `plain`: the question, the answer is all of the response."""
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of the task as reasoning-gym names them, such as {min_terms: 2}."""

    @classmethod
    def parametrised(cls, task: str) -> type[ReasoningGym]:
        """The class for one task."""
        return variant(cls, f"The task {task} of reasoning-gym.", task=task)

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            entry = self._entry(index)
            answer = entry["answer"]
            yield Prompt(
                id=index, prompt=self._ask(entry["question"]), target=answer if isinstance(answer, str) else None
            )

    def score(self, text: str, prompt: Prompt) -> float:
        answer = text.strip() if self.style == "plain" else find(text)
        dataset, entry = self._dataset(prompt.id // CHUNK), self._entry(prompt.id)
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - the scorer of another library, given whatever a model wrote: not an answer
            return 0.0

    def reference(self, prompt: Prompt) -> str | None:
        return None if prompt.target is None else self._answer(prompt.target)

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        for index in count(start):  # the answer belongs to another question: the format alone
            entry, other = self._entry(index, "demonstrations"), self._entry(index + 1, "demonstrations")
            yield self._ask(entry["question"]), self._answer(str(other["answer"]))

    def _ask(self, question: str) -> str | list[Message]:
        if self.style == "plain":
            return f"{question}\n"
        return [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]

    def _answer(self, text: str) -> str:
        return text if self.style == "plain" else f"<answer>{text}</answer>"

    def _entry(self, index: int, stream: str = "prompts") -> dict[str, Any]:
        return self._dataset(index // CHUNK, stream)[index % CHUNK]

    def _dataset(self, chunk: int, stream: str = "prompts") -> Any:
        # reasoning-gym makes item i of seed s from s + i: chunks must not overlap, nor the streams, nor runs' seeds.
        shift = 1 << 30 if stream == "demonstrations" else 0
        seed = (self.seed * 100_000_007 + chunk * CHUNK + shift) % (1 << 31)
        return _dataset(self.task, seed, msgspec.json.encode(self.config))


@lru_cache(maxsize=4)
def _dataset(task: str, seed: int, config: bytes) -> Any:
    """One chunk. Raises ValueError for a task or a setting that reasoning-gym does not have."""
    gym = require("reasoning_gym", extra="reasoning-gym", wanted_by=f"environment reasoning_gym:{task or 'TASK'}")
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reasoning-gym has no task {task!r}{hint} (it has {len(DATASETS)}, such as chain_sum)")
    try:
        return gym.create_dataset(task, seed=seed, size=CHUNK, **msgspec.json.decode(config))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"env.config of reasoning_gym:{task}: {error}") from error
