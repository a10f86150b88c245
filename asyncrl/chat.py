"""Prompts as token ids: chat messages through the model's template, and the turns that follow a sampled reply.

The rollout loop, the scripted model, the supervised warm-up and the evaluation encode through this, so all of them mean
the same ids by the same messages. Tokens in, tokens out: it never decodes and never encodes sampled text again. A later
turn is the template's text *after* a reply, encoded on its own and appended to the ids that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asyncrl.types import Message

if TYPE_CHECKING:
    from asyncrl.config import Config

REPLY = "PLACEHOLDEROFTHEREPLY"
"""Stands for the sampled reply while a template is rendered; its text never becomes tokens."""

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a template (base models): `User: ...`, a line each, then `Assistant:`."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How one model is talked to. Raises ValueError at construction when its tokenizer cannot work."""

    tokenizer: Any
    template: str | None = None
    """Replaces the tokenizer's own."""
    system_prompt: str | None = None
    """Put before messages that have none."""
    thinking: bool | None = None
    """Passed to templates that know `enable_thinking`."""

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> Chat:
        """What the configuration says about the chat format, for this tokenizer."""
        return cls(
            tokenizer=tokenizer,
            template=config.model.chat_template,
            system_prompt=config.model.system_prompt,
            thinking=config.generation.thinking,
        )

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, so no response could end; set eos_token in its folder")

    @property
    def is_plain(self) -> bool:
        """Neither the model nor the configuration has a chat template: messages become plain text."""
        return self.template is None and not self.tokenizer.chat_template

    @property
    def pad_id(self) -> int:
        """What fills padded positions, where something pads. Often EOS: nothing may take PAD for the end of a text."""
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: EOS, and the template's own end of turn where that is another token."""
        end = self._ids(self._after_reply([], reply_next=False))[:1]
        return tuple(dict.fromkeys([self.tokenizer.eos_token_id, *(t for t in end if self._is_special(t))]))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt. Text as it is, with what the tokenizer puts in front; messages by the template."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        text = self._render(self._with_system(prompt), reply_next=True)
        return list(self.tokenizer.encode(text)) if self.is_plain else self._ids(text)

    def turn(self, messages: Sequence[Message], *, after: int | None) -> list[int]:
        """Token ids between a reply and the next: its end where that is missing, `messages`, the opening of the next.

        `after` is the last sampled token: a reply that ended by itself already holds the token that ends a turn, which
        must not come twice. Raises ValueError when the template does not show assistant messages as they are.
        """
        ids = self._ids(self._after_reply(messages, reply_next=True))
        ended = after is not None and after in self.stop_ids
        return ids[1:] if ended and ids and self._is_special(ids[0]) else ids

    def _after_reply(self, messages: Sequence[Message], *, reply_next: bool) -> str:
        opening: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
        text = self._render([*opening, *messages], reply_next=reply_next)
        before, found, following = text.rpartition(REPLY)
        if not found or REPLY in before:
            raise ValueError("the chat template must show an assistant message exactly once; set model.chat_template")
        return following

    def _is_special(self, token: int) -> bool:
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        """Named special tokens, and those that only the tokenizer's file marks as special."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset([*self.tokenizer.all_special_ids, *(token for token, how in added.items() if how.special)])

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system_prompt is None or any(m["role"] == "system" for m in messages):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _render(self, messages: Sequence[Message], *, reply_next: bool) -> str:
        template = self.template or (PLAIN_TEMPLATE if self.is_plain else None)
        known = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return self.tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=reply_next, **known
        )

    def _ids(self, text: str) -> list[int]:
        # A rendered template spells its own special tokens: the tokenizer must not add BOS a second time.
        return list(self.tokenizer.encode(text, add_special_tokens=False))
