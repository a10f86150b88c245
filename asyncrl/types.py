"""The data that flows between the rooms: prompts, completions, episodes, groups, and the batch that a loss sees.

Plain data, no behaviour beyond construction and size; every room imports this and it imports none of them. No torch
here: the arrays that travel are numpy, and `Batch` names torch tensors only for the type checker.

Shape suffixes, used in every name of a tensor or array:

    _P  prompts (groups) of a batch          _G  siblings of one group
    _B  sequences of a batch (P * G)         _T  trained tokens (the tokens a policy sampled and the loss sees)
    _S  positions of a packed micro-batch, prompts and observations included
    _V  vocabulary                           _H  hidden width
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Message = dict[str, str]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}."""

NOT_SAMPLED = -1
"""The version of a token that no policy sampled (tool output, user turns)."""


class EngineDead(RuntimeError):
    """The engine can serve no further request; the generator process ends and is restarted."""


class Refusal(ValueError):
    """What only the user can change ends a process of a run: shown as one line, the traceback stays in RUN/errors."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task of an environment. `id` is its position in the environment's stream; it never repeats within a run."""

    id: int
    prompt: str | list[Message]
    """Raw text (base models) or chat messages (rendered with the model's template)."""
    target: Any = None
    """What the reward compares with: any JSON value."""
    metadata: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one completion is sampled. Only temperature shapes the distribution: top-p and top-k change its support."""

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Fixes the sampled tokens of this request, whatever runs beside it (local engine)."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request. Arrays have one entry per sampled token, shape (T,).

    An aborted completion (`finish_reason == "abort"`) holds what was sampled so far and is never trained.
    """

    prompt_ids: np.ndarray
    """int32 (prompt length,): exactly what the model was given."""
    token_ids: np.ndarray
    """int32 (T,): sampled tokens, the stop token included."""
    logprobs: np.ndarray
    """float32 (T,): log-probability under the distribution that was sampled from (temperature applied)."""
    versions: np.ndarray
    """int32 (T,): the policy version that sampled each token."""
    finish_reason: FinishReason
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Episode:
    """One response with its reward: a prompt, then everything that followed, sampled or observed.

    `token_ids`, `logprobs`, `versions` and `loss_mask` align, shape (T_i,), over what follows the prompt. Observed
    tokens (tool output, later user turns) have `loss_mask` False, version -1 and log-probability 0.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    loss_mask: np.ndarray
    reward: float
    finish_reason: FinishReason
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, logged as reward/<name>."""
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, which is what a buffer's capacity counts."""
        arrays = (self.prompt_ids, self.token_ids, self.logprobs, self.versions, self.loss_mask)
        return sum(a.nbytes for a in arrays) + len(self.text)


@dataclass(slots=True, kw_only=True)
class Group:
    """The episodes of one prompt: the unit that is leased, inserted, taken and trained."""

    lease_id: int
    """The lease under which it was generated; -1 outside a run."""
    prompt: Prompt
    episodes: list[Episode]

    @property
    def num_tokens(self) -> int:
        return sum(e.num_tokens for e in self.episodes)

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.episodes)

    @property
    def rewards_G(self) -> np.ndarray:
        return np.array([e.reward for e in self.episodes], dtype=np.float64)

    @property
    def oldest_version(self) -> int:
        """The smallest version among sampled tokens; NOT_SAMPLED when there is none."""
        sampled = [e.versions[e.loss_mask] for e in self.episodes]
        return min((int(v.min()) for v in sampled if len(v)), default=NOT_SAMPLED)


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a loss sees: the trained tokens of one micro-batch, packed without padding, and nothing else.

    Tokens that are not trained (prompts, observations, masked responses) are left out before the loss, so nothing under
    a mask can reach an `exp`. Whole responses are kept together, in order; `sequence_T` says which token belongs to
    which. All floating tensors are fp32.
    """

    behaviour_T: Tensor
    """log mu: recorded by the generator at sampling."""
    advantages_T: Tensor
    """The advantage of the response, repeated over its tokens."""
    lags_T: Tensor
    """int64: trainer version minus the version that sampled the token; >= 0."""
    sequence_T: Tensor
    """int64: index of the response within this micro-batch, 0..num_sequences-1, non-decreasing."""
    num_sequences: int
    weights_T: Tensor
    """Aggregation weight over the whole global batch; the engine multiplies the loss by it and sums."""
    rewards_T: Tensor
    """The reward of the response, repeated over its tokens (topr looks at its sign)."""
    proximal_T: Tensor | None = None
    """log prox: the trainer's weights at the start of the batch; None unless the algorithm asked for it."""
    reference_T: Tensor | None = None
    """log ref: the reference policy; None unless the algorithm asked for it."""
    entropy_T: Tensor | None = None
    """Exact entropy of the current policy, differentiable; None unless the algorithm asked for it."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """What `Algorithm.statistics` returned, summed over the whole global batch: scalars or 1-d sums."""
