"""What an environment is: a resumable stream of prompts, and a rollout that turns one prompt into an episode.

The class's fields are the `env` section of the configuration and the `--help` text. The simplest environment defines
`prompts` and `score`; one with several turns or tools defines `rollout`. Tokens in, tokens out: a rollout never encodes
sampled text again. An environment never imports torch: it also runs in the replay server and in reward workers.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from asyncrl.types import NOT_SAMPLED, Completion, Episode, FinishReason, Message, Prompt

Score = float | dict[str, float]
"""A reward, or named rewards whose sum it is."""


class Generate(Protocol):
    """What a rollout calls: one engine, one group's sampling settings, bounded by the group's lease."""

    tokenizer: Any
    """The model's Hugging Face tokenizer."""

    async def __call__(
        self, prompt: str | list[Message] | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[int] = ()
    ) -> Completion:
        """Sample one completion. Text and messages are encoded once; token ids are used as they are."""
        ...

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt: messages through the model's chat template, text as it is."""
        ...

    async def score(self, text: str, prompt: Prompt) -> Score:
        """`Env.score` in a worker process, with the configured timeout. Raises RewardError or RewardTimeout."""
        ...


class Env(msgspec.Struct, kw_only=True, dict=True):
    """Base of every environment. Fields are configuration; anything computed goes in a `functools.cached_property`."""

    seed: int = 0
    """Order and content of the prompts."""

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        """Yield the prompts `start, start + 1, ...`, ids included; finite or endless; the same for the same fields."""
        raise NotImplementedError(f"{type(self).__name__} must define prompts(start)")

    def score(self, text: str, prompt: Prompt) -> Score | Awaitable[Score]:
        """The reward of a response. Runs in a worker process; may raise; slow ones are stopped by a timeout."""
        raise NotImplementedError(f"{type(self).__name__} must define score(text, prompt) or rollout(prompt, generate)")

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        """One prompt -> one episode. This default is single-turn: generate once, score the text."""
        completion = await generate(prompt.prompt)
        return episode(completion, await generate.score(completion.text, prompt))

    def score_group(self, episodes: list[Episode], prompt: Prompt) -> list[Episode]:
        """Adjust rewards with all siblings in view (ranking, diversity). The default changes nothing."""
        return episodes

    def reference(self, prompt: Prompt) -> str | None:
        """A response that should score full marks, for `asyncrl envs check`; None when the environment knows none."""
        return None

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str, str]]:
        """Yield (prompt text, response text without EOS) for a supervised warm-up: endless, deterministic.

        What they teach is the environment's choice; the demo's teach the format and nothing of the task. Optional: only
        a run with a warm-up (`training.warmup_sft_steps`) asks, and NotImplementedError then ends it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations: set training.warmup_sft_steps to 0")


def seeded(*key: int | str) -> random.Random:
    """A source of randomness that depends on the key alone: the same on every machine, in any order of access."""
    return random.Random("/".join(map(str, key)))


def episode(completion: Completion, score: Score, **metadata: Any) -> Episode:
    """An episode of one completion: every sampled token is trained."""
    named = score if isinstance(score, dict) else {}
    return Episode(
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        loss_mask=np.ones(len(completion.token_ids), dtype=bool),
        reward=float(sum(named.values())) if named else float(score),  # type: ignore[arg-type]
        rewards=dict(named),
        finish_reason=completion.finish_reason,
        text=completion.text,
        metadata={**completion.metadata, **metadata},
    )


class Conversation:
    """Several turns as one stream of tokens: what the policy sampled is trained, what it was shown is not.

    talk = Conversation(generate, prompt.prompt)
    reply = await talk.generate()
    talk.observe("the tool says 42")
    reply = await talk.generate()
    return talk.episode(reward)
    """

    def __init__(self, generate: Generate, prompt: str | list[Message]) -> None:
        self._generate = generate
        self._prompt_ids = list(generate.encode(prompt))
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]] = []
        self._texts: list[str] = []
        self._finish: FinishReason = "stop"

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, prompt included: what the next completion is conditioned on."""
        return self._prompt_ids + [int(t) for ids, *_ in self._parts for t in ids]

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[int] = ()) -> Completion:
        """Sample the next turn and append its tokens."""
        completion = await self._generate(self.token_ids, max_tokens=max_tokens, stop=stop)
        self._parts.append((completion.token_ids, completion.logprobs, completion.versions, True))
        self._texts.append(completion.text)
        self._finish = completion.finish_reason
        return completion

    def observe(self, text: str) -> None:
        """Append text that the policy is shown and not trained on. It is encoded here, once, on its own."""
        self.observe_ids(self._generate.tokenizer.encode(text, add_special_tokens=False))
        self._texts.append(text)

    def observe_ids(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy is shown and not trained on."""
        ids = np.asarray(token_ids, dtype=np.int32)
        zeros, none = np.zeros(len(ids), np.float32), np.full(len(ids), NOT_SAMPLED, np.int32)
        self._parts.append((ids, zeros, none, False))

    def episode(self, score: Score, **metadata: Any) -> Episode:
        """The whole conversation as one episode."""
        whole = Completion(
            prompt_ids=np.asarray(self._prompt_ids, np.int32),
            token_ids=np.concatenate([p[0] for p in self._parts] or [np.zeros(0, np.int32)]),
            logprobs=np.concatenate([p[1] for p in self._parts] or [np.zeros(0, np.float32)]),
            versions=np.concatenate([p[2] for p in self._parts] or [np.zeros(0, np.int32)]),
            finish_reason=self._finish,
            text="".join(self._texts),
        )
        result = episode(whole, score, **metadata)
        result.loss_mask = np.concatenate([np.full(len(p[0]), p[3]) for p in self._parts] or [np.zeros(0, bool)])
        return result


RewardFunction = Callable[[str, str, Any], float | Awaitable[float]]
"""A user's reward: (prompt, response, target) -> float, sync or async."""
