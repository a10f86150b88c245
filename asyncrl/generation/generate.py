"""What a rollout calls: `generate(...)` of one episode, bound to an engine, a chat format and a seed.

Made by `rollout.py` for each episode (and by the evaluation). Text is encoded once, token ids are used as they are, and
what was sampled is never encoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.chat import Chat
from asyncrl.env import Score
from asyncrl.generation.engine import Engine
from asyncrl.types import Completion, Message, Prompt, SamplingParams


class TooLong(ValueError):
    """Prompt plus response would not fit into `training.seq_len`."""


class Aborted(RuntimeError):
    """The engine ended the request before it was finished."""


def hash64(*key: int | str) -> int:
    """An integer in [0, 2**64) that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds and shapes every completion of a run."""

    max_tokens: int
    """Longest response, per completion."""
    seq_len: int
    """Longest prompt plus response."""
    temperature: float


@dataclass(slots=True, kw_only=True)
class EngineGenerate:
    """`env.Generate` for one episode. `seed` tells this episode from all others; each call adds its own number."""

    engine: Engine
    chat: Chat
    limits: Limits
    seed: tuple[int, ...]
    scorer: Callable[[str, Prompt], Awaitable[Score]]
    num_tokens: int = field(default=0, init=False)
    """Sampled so far, over all calls."""
    tokenizer: Any = field(init=False)
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tokenizer = self.chat.tokenizer

    async def __call__(
        self, prompt: str | list[Message] | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[int] = ()
    ) -> Completion:
        """Sample one completion of at most `max_tokens`, by default `generation.max_tokens`.

        Raises TooLong, Aborted, EngineDead.
        """
        prompt_ids = self._prompt_ids(prompt)
        limit = self.limits.max_tokens if max_tokens is None else min(max_tokens, self.limits.max_tokens)
        if len(prompt_ids) + limit > self.limits.seq_len:
            raise TooLong(
                f"a prompt of {len(prompt_ids)} tokens plus a response of up to {limit} exceeds training.seq_len "
                f"{self.limits.seq_len}"
            )
        params = SamplingParams(
            max_tokens=limit,
            temperature=self.limits.temperature,
            stop_token_ids=(*self.chat.stop_ids, *stop),
            seed=hash64(*self.seed, self._calls),
        )
        self._calls += 1
        completion = await self.engine.generate(prompt_ids, params)
        self.num_tokens += len(completion.token_ids)
        if completion.finish_reason == "abort":
            raise Aborted("the engine aborted the request")
        completion.text = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return completion

    def encode(self, prompt: str | list[Message]) -> list[int]:
        return self.chat.encode(prompt)

    def encode_turn(self, messages: list[Message], *, after: int | None) -> list[int]:
        return self.chat.turn(messages, after=after)

    async def score(self, text: str, prompt: Prompt) -> Score:
        """The environment's score, from a worker process. Raises RewardError or RewardTimeout."""
        return await self.scorer(text, prompt)

    def _prompt_ids(self, prompt: str | list[Message] | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict)):
            return self.encode(prompt)  # type: ignore[arg-type]
        return [int(t) for t in prompt]  # type: ignore[arg-type]
