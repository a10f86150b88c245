"""A model that plays a script: the real environment, tokenizer and conversation, with replies that were written before.

`asyncrl envs check` and the tests of environments use it in place of an engine. It samples nothing; log-probabilities
are 0 and versions are 0. It encodes a scripted reply because a script is text; nothing else ever does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.chat import Chat
from asyncrl.env import Env, Score, checked
from asyncrl.types import Completion, Episode, Message, Prompt

Script = str | Sequence[str] | Callable[[str], str]
"""One reply for every turn, one reply per turn, or a function from the text of the context to the reply."""


class OutOfScript(RuntimeError):
    """The environment asked for more turns than the script has."""


class Scripted:
    """`Generate` for one rollout of `env`: replies come from the script, rewards from `env.score` in this process."""

    def __init__(self, env: Env, script: Script, *, chat: Chat | None = None, max_tokens: int = 4096) -> None:
        self.env, self.script, self.max_tokens = env, script, max_tokens
        self.chat = chat if chat is not None else Chat(tokenizer=byte_tokenizer())
        self.tokenizer = self.chat.tokenizer
        self.calls: list[Completion] = []
        """What was asked and answered so far, in order."""

    async def __call__(
        self, prompt: str | list[Message] | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[int] = ()
    ) -> Completion:
        prompt_ids = self._prompt_ids(prompt)
        reply = self._reply(prompt_ids)
        ids = [*self.tokenizer.encode(reply, add_special_tokens=False), self.tokenizer.eos_token_id]
        limit = self.max_tokens if max_tokens is None else max_tokens
        completion = Completion(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            token_ids=np.asarray(ids[:limit], np.int32),
            logprobs=np.zeros(len(ids[:limit]), np.float32),
            versions=np.zeros(len(ids[:limit]), np.int32),
            finish_reason="stop" if len(ids) <= limit else "length",
            text=self.tokenizer.decode(ids[:limit], skip_special_tokens=True),
        )
        self.calls.append(completion)
        return completion

    def encode(self, prompt: str | list[Message]) -> list[int]:
        return self.chat.encode(prompt)

    def encode_turn(self, messages: list[Message], *, after: int | None) -> list[int]:
        return self.chat.turn(messages, after=after)

    async def score(self, text: str, prompt: Prompt) -> Score:
        score = self.env.score(text, prompt)
        return checked(await score if inspect.isawaitable(score) else score)

    def _prompt_ids(self, prompt: str | list[Message] | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
            return self.encode(prompt)  # type: ignore[arg-type]
        return [int(t) for t in prompt]  # type: ignore[arg-type]

    def _reply(self, prompt_ids: list[int]) -> str:
        if callable(self.script):
            return self.script(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        if isinstance(self.script, str):
            return self.script
        if len(self.calls) >= len(self.script):
            raise OutOfScript(
                f"the environment asked for turn {len(self.calls) + 1} of a script with {len(self.script)}"
            )
        return self.script[len(self.calls)]


async def play(env: Env, prompt: Prompt, script: Script, *, chat: Chat | None = None) -> tuple[Scripted, Episode]:
    """One rollout of the environment against a script: the model that played, with its calls, and the episode."""
    generate = Scripted(env, script, chat=chat)
    return generate, await env.rollout(prompt, generate)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer for any text, one token per byte, with a chat template: for checks without a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
