"""What an environment is: a resumable stream of prompts, and a rollout that turns one prompt into an episode.

The class's fields are the `env` section of the configuration and the `--help` text. The simplest environment defines
`prompts` and `score`; one with several turns or tools defines `rollout`. Tokens in, tokens out: a rollout never encodes
sampled text again. An environment never imports torch: it also runs in the replay server and in reward workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol, SupportsFloat, TypeVar

import msgspec
import numpy as np

from asyncrl.types import NOT_SAMPLED, Completion, Episode, FinishReason, Message, Prompt

Score = float | dict[str, float]
"""A reward, or named rewards whose sum it is. Each name is logged as reward/<name>."""

FULL_MARKS = 1.0
"""What a reference response scores, unless the class says otherwise."""

EVALUATION_SEED = 1_000_003
"""Added to the seed for evaluation: far from any seed that a sweep of runs would train on."""


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
        """Token ids of a prompt: messages through the model's chat template, text as it is (`Chat.encode`)."""
        ...

    def encode_turn(self, messages: list[Message], *, after: int | None) -> list[int]:
        """Token ids between a reply, whose last sampled token is `after`, and the next one (`Chat.turn`)."""
        ...

    async def score(self, text: str, prompt: Prompt) -> Score:
        """`Env.score` in a worker process, with the configured timeout. Raises RewardError or RewardTimeout."""
        ...


class Env(msgspec.Struct, kw_only=True, dict=True):
    """Base of every environment. Fields are configuration; anything computed goes in a `functools.cached_property`."""

    full_marks: ClassVar[float] = FULL_MARKS
    """The reward that `reference` responses must reach in `asyncrl envs check`."""

    tiny: ClassVar[dict[str, Any]] = {}
    """Configuration for runs with the `tiny` model, sections of keys, below everything the user wrote."""

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
        """Adjust rewards with all siblings in view (ranking, diversity): `reward` and `rewards` of each, in order.

        Runs in the generator when all siblings are there, so it must be quick. The default changes nothing.
        """
        return episodes

    def reference(self, prompt: Prompt) -> str | list[str] | None:
        """A response that scores full marks, or one reply per turn; None when the environment knows none.

        `asyncrl envs check` plays it against the environment, so a reward that its own answers fail is found at once.
        """
        return None

    def check(self) -> None:
        """Called once at start-up, before any process: raise ValueError, in one line, for what cannot work.

        The default makes the first prompt, so that a missing file, column or library is reported there.
        """
        next(iter(self.prompts()), None)

    async def validate(self, num_prompts: int = 8) -> list[str]:
        """Play the reference responses of the first prompts; returns what does not score full marks, a line each.

        Empty when all do, or when the environment knows no references. Multi-turn environments are played in full.
        """
        from asyncrl.scripted import play  # it imports this module

        wrong = []
        for prompt in islice(self.prompts(), num_prompts):
            reference = self.reference(prompt)
            if reference is None:
                continue
            _, result = await play(self, prompt, reference)
            if not math.isclose(result.reward, self.full_marks, abs_tol=1e-6):
                wrong.append(f"prompt {prompt.id}: its own reference scores {result.reward:g}, not {self.full_marks:g}")
        return wrong

    def evaluation(self) -> Env:
        """The environment that measures progress on this one: by default the same with another seed."""
        return msgspec.structs.replace(self, seed=self.seed + EVALUATION_SEED)

    def epoch_prompts(self) -> int | None:
        """How many prompts make one pass over the data, for the figure data/epoch; None: endless, or nobody knows."""
        return None

    def epoch_demonstrations(self) -> int | None:
        """How many demonstrations do."""
        return None

    def demonstrations(self, start: int = 0) -> Iterator[tuple[str | list[Message], str]]:
        """Yield (prompt, response text without EOS) for supervised training, which ends where they do. Deterministic.

        What they teach is the environment's choice; the demo's teach the format and nothing of the task. Optional: only
        `asyncrl sft` and a warm-up (`training.warmup_sft_steps`) ask for them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations: set training.warmup_sft_steps to 0")


def has_demonstrations(env: Env | type[Env]) -> bool:
    """Whether its class defines them; a mixture does, and asks its components only when it is read."""
    cls = env if isinstance(env, type) else type(env)
    return cls.demonstrations is not Env.demonstrations


E = TypeVar("E", bound=Env)


def variant(cls: type[E], summary: str, **defaults: str) -> type[E]:
    """A subclass with other defaults and a summary of its own: what `parametrised` returns for `name:parameter`."""
    fields = [(name, str, value) for name, value in defaults.items()]
    made = msgspec.defstruct(cls.__name__, fields, bases=(cls,), module=cls.__module__, kw_only=True)
    made.__doc__ = summary
    return made  # type: ignore[return-value]


def seeded(*key: int | str) -> random.Random:
    """A source of randomness that depends on the key alone: the same on every machine, in any order of access."""
    return random.Random("/".join(map(str, key)))


def checked(score: Any) -> Score:
    """A score that can be trained on: a finite number, or a dict of them. Anything else raises ValueError."""
    if isinstance(score, dict):
        if not score:
            raise ValueError("a reward must be a number or named numbers, got an empty dict")
        return {str(name): _finite(value, f"reward {name!r}") for name, value in score.items()}
    return _finite(score, "a reward")


def _finite(value: Any, what: str) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise ValueError(f"{what} must be a number, got {type(value).__name__} {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number


def total(score: Score) -> float:
    """The one number of a score: the sum of its parts."""
    return float(sum(score.values())) if isinstance(score, dict) else float(score)


def episode(completion: Completion, score: Score, **metadata: Any) -> Episode:
    """An episode of one completion: every sampled token is trained. Raises ValueError for a score that is no number."""
    score = checked(score)
    return Episode(
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        loss_mask=np.ones(len(completion.token_ids), dtype=bool),
        reward=total(score),
        rewards=dict(score) if isinstance(score, dict) else {},
        finish_reason=completion.finish_reason,
        text=completion.text,
        metadata={**completion.metadata, **metadata},
    )


class Conversation:
    """Several turns as one stream of tokens: what the policy sampled is trained, what it was shown is not.

    talk = Conversation(generate, prompt.prompt)
    reply = await talk.generate()
    talk.reply("the tool says 42", role="tool")
    reply = await talk.generate()
    return talk.episode(reward)

    Sampled ids are kept as they are: no text is encoded twice, and an earlier turn is never rendered again (so a
    template that hides the thinking of earlier turns does not act; the policy sees what it wrote).
    """

    def __init__(self, generate: Generate, prompt: str | list[Message]) -> None:
        self._generate = generate
        self._prompt_ids = list(generate.encode(prompt))
        self._chat = not isinstance(prompt, str)
        self._parts: list[Part] = []
        self._finish: FinishReason = "stop"

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, prompt included: what the next completion is conditioned on."""
        return self._prompt_ids + [int(t) for part in self._parts for t in part.token_ids]

    @property
    def truncated(self) -> bool:
        """The last reply hit its limit of tokens or was aborted: there is nothing sensible to answer it with."""
        return self._finish != "stop"

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[int] = ()) -> Completion:
        """Sample the next turn and append its tokens."""
        completion = await self._generate(self.token_ids, max_tokens=max_tokens, stop=stop)
        self._parts.append(
            Part(completion.token_ids, completion.logprobs, completion.versions, trained=True, text=completion.text)
        )
        self._finish = completion.finish_reason
        return completion

    def reply(self, content: str, *, role: str = "user") -> None:
        """Answer the last turn: a message by the chat template, or plain text when the prompt was plain text."""
        if self._chat:
            self.extend([{"role": role, "content": content}])
        else:
            self.observe(content)

    def extend(self, messages: list[Message]) -> None:
        """Answer the last turn with several messages, by the chat template."""
        last = self._parts[-1].token_ids if self._parts else np.zeros(0, np.int32)
        after = int(last[-1]) if len(last) else None
        text = "\n".join(message["content"] for message in messages)
        self.observe_ids(self._generate.encode_turn(messages, after=after), text=text)

    def observe(self, text: str) -> None:
        """Append text that the policy is shown and not trained on. It is encoded here, once, on its own."""
        self.observe_ids(self._generate.tokenizer.encode(text, add_special_tokens=False), text=text)

    def observe_ids(self, token_ids: Sequence[int], *, text: str = "") -> None:
        """Append tokens that the policy is shown and not trained on."""
        ids = np.asarray(token_ids, dtype=np.int32)
        zeros, none = np.zeros(len(ids), np.float32), np.full(len(ids), NOT_SAMPLED, np.int32)
        self._parts.append(Part(ids, zeros, none, trained=False, text=text))

    def episode(self, score: Score, **metadata: Any) -> Episode:
        """The whole conversation as one episode, up to the last reply: observations after it are left out."""
        parts = list(self._parts)
        while parts and not parts[-1].trained:
            parts.pop()
        whole = Completion(
            prompt_ids=np.asarray(self._prompt_ids, np.int32),
            token_ids=_joined([p.token_ids for p in parts], np.int32),
            logprobs=_joined([p.logprobs for p in parts], np.float32),
            versions=_joined([p.versions for p in parts], np.int32),
            finish_reason=self._finish,
            text="".join(p.text if p.trained else f"\n[{p.text}]\n" for p in parts),
        )
        result = episode(whole, score, **{"turns": sum(p.trained for p in parts), **metadata})
        result.loss_mask = _joined([np.full(len(p.token_ids), p.trained) for p in parts], bool)
        return result


@dataclass(frozen=True, slots=True)
class Part:
    """A run of tokens of a conversation that was either sampled or observed. Arrays align, shape (T,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    trained: bool
    text: str


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


RewardFunction = Callable[[str, str, Any], float | Awaitable[float]]
"""A user's reward: (prompt, response, target) -> float, sync or async."""
