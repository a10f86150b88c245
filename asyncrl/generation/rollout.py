"""From leases to groups: the loop that keeps a generator's engine busy.

Run by `generator.py` as one task. It leases prompts, rolls out the siblings of each together, and ends every lease in
exactly one way: inserted, or dropped for a named reason. A rollout that fails is data, never a crash; it computes no
reward and knows no algorithm beyond `reward` and `keep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import nan
from typing import Protocol

import numpy as np

from asyncrl.algorithm import Algorithm
from asyncrl.chat import Chat
from asyncrl.config import Config
from asyncrl.env import Env, Score
from asyncrl.generation.engine import Engine, EngineDead
from asyncrl.generation.generate import Aborted, EngineGenerate, Limits, TooLong
from asyncrl.generation.rewards import RewardError, RewardTimeout
from asyncrl.replay import wire
from asyncrl.replay.messages import Lease
from asyncrl.types import Episode, Group, Prompt

log = logging.getLogger(__name__)
CATCH_UP_S = 10.0
"""How long a group waits for the version of its lease: sampled from older weights it would count for nothing."""
CATCH_UP_LOOK_S = 0.01
LOGGED_FAILURES = 20
"""Failed rollouts that are logged with their traceback; later ones are counted by the server alone."""


class RolloutTimeout(RuntimeError):
    """A rollout took longer than `generation.rollout_timeout_s`."""


class BadEpisode(ValueError):
    """What an environment returned cannot be trained on."""


class Client(Protocol):
    """What the loop needs of `AsyncReplayClient`."""

    async def lease(self, n: int) -> list[Lease]: ...

    async def insert(self, group: Group) -> bool: ...

    async def drop(
        self,
        lease_id: int,
        reason: str,
        *,
        num_tokens: int = 0,
        reward: float = nan,
        length: float = nan,
        why: str = "",
    ) -> None: ...


REASONS: tuple[tuple[type[Exception], str], ...] = (
    (RewardTimeout, "reward_timeout"),
    (RewardError, "reward_error"),
    (RolloutTimeout, "rollout_timeout"),
    (TooLong, "too_long"),
    (Aborted, "aborted"),
    (Exception, "rollout_error"),
)
"""The first that fits names the drop."""


@dataclass(slots=True)
class Siblings:
    """The rollouts of one lease: what each sampled, and the episodes that are there already."""

    generates: list[EngineGenerate]
    episodes: list[Episode] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(g.num_tokens for g in self.generates)

    def means(self) -> dict[str, float]:
        """Mean reward and mean length of the finished episodes, for the ledger of drops; NaN without any."""
        if not self.episodes:
            return {"reward": nan, "length": nan}
        lengths = [int(e.loss_mask.sum()) for e in self.episodes]
        return {"reward": float(np.mean([e.reward for e in self.episodes])), "length": float(np.mean(lengths))}


class RolloutLoop:
    """Keeps `generation.max_groups` groups going until the run is finished."""

    def __init__(
        self,
        *,
        engine: Engine,
        env: Env,
        algo: Algorithm,
        client: Client,
        chat: Chat,
        config: Config,
        score: Callable[[str, Prompt], Awaitable[Score]],
    ) -> None:
        self._engine, self._env, self._algo, self._client = engine, env, algo, client
        self._chat, self._config, self._score = chat, config, score
        self._limits = Limits(
            max_tokens=config.generation.max_tokens,
            seq_len=config.training.seq_len,
            temperature=algo.temperature,
        )
        self._max_groups = config.generation.max_groups or max(
            1, config.generation.max_concurrency // max(1, algo.n_samples)
        )
        self._failures = 0

    async def run(self) -> None:
        """Consumes leases; waits for one while there is room for a group, and for a group's end while there is none;
        is unblocked by the server or by a group that ended; produces inserts and drops. Returns when the run is
        finished; groups that are under way then are abandoned. Raises EngineDead, and what the client raises.
        """
        room = asyncio.Semaphore(self._max_groups)
        async with asyncio.TaskGroup() as groups:
            under_way: set[asyncio.Task[None]] = set()
            while leases := await self._lease(room, len(under_way)):
                for i, lease in enumerate(leases):
                    if i:
                        await room.acquire()  # free: as many were asked for as there was room
                    task = groups.create_task(self.group(lease), name=f"group {lease.id}")
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                    task.add_done_callback(lambda _: room.release())
            for task in under_way:
                task.cancel()

    async def _lease(self, room: asyncio.Semaphore, under_way: int) -> list[Lease]:
        await room.acquire()
        return await self._client.lease(max(1, self._max_groups - under_way))

    async def group(self, lease: Lease) -> None:
        """Roll out one lease to its end: inserted or dropped."""
        await self._catch_up(lease.version)
        siblings = Siblings([self._generate(lease.prompt, sample) for sample in range(self._algo.n_samples)])
        try:
            group = await self._roll_out(lease, siblings)
        except EngineDead:
            raise
        except Exception as error:  # noqa: BLE001 the boundary to an environment's code: a failed rollout is data
            self._log(lease, error)
            await self._drop(lease, _reason(error), siblings, why=_in_words(error))
            return
        if self._algo.keep(group.rewards_G):
            await self._client.insert(group)
        else:
            await self._drop(lease, "filtered", siblings)

    async def _catch_up(self, version: int) -> None:
        """Wait until the engine serves `version`, the lease's, at most CATCH_UP_S. It does not yet when this generator
        missed a sync, or its trainer has started again; new weights are on their way then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while self._engine.version < version:
                    await asyncio.sleep(CATCH_UP_LOOK_S)

    async def _drop(self, lease: Lease, reason: str, siblings: Siblings, why: str = "") -> None:
        await self._client.drop(lease.id, reason, num_tokens=siblings.num_tokens, why=why, **siblings.means())

    def _generate(self, prompt: Prompt, sample: int) -> EngineGenerate:
        seed = (self._config.seed, prompt.id, sample)
        return EngineGenerate(engine=self._engine, chat=self._chat, limits=self._limits, seed=seed, scorer=self._score)

    async def _roll_out(self, lease: Lease, siblings: Siblings) -> Group:
        """All siblings at once. The first that fails fails the group, and the others are cancelled."""
        tasks = [asyncio.ensure_future(self._episode(lease.prompt, g, siblings)) for g in siblings.generates]
        try:
            episodes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._finish(lease, episodes)

    async def _episode(self, prompt: Prompt, generate: EngineGenerate, siblings: Siblings) -> Episode:
        limit_s = self._config.generation.rollout_timeout_s
        try:
            async with asyncio.timeout(limit_s) as clock:
                episode = await self._env.rollout(prompt, generate)
        except TimeoutError as error:
            if not clock.expired():  # the environment's own
                raise
            raise RolloutTimeout(f"a rollout of prompt {prompt.id} took longer than {limit_s:g} s") from error
        self._check(episode)
        siblings.episodes.append(episode)
        return episode

    def _finish(self, lease: Lease, episodes: list[Episode]) -> Group:
        """Rewards as they are trained on, and a last look: what cannot travel is the environment's fault, here."""
        episodes = self._env.score_group(episodes, lease.prompt)
        for episode in episodes:
            episode.reward = float(self._algo.reward(episode, self._config.generation.max_tokens))
            if not math.isfinite(episode.reward):
                raise RewardError(f"the reward of prompt {lease.prompt.id} is {episode.reward}")
        if len(episodes) != self._algo.n_samples:
            raise BadEpisode(f"score_group returned {len(episodes)} episodes for {self._algo.n_samples}")
        group = Group(lease_id=lease.id, prompt=lease.prompt, episodes=episodes)
        wire.pack_group(group)
        return group

    def _check(self, episode: Episode) -> None:
        if not isinstance(episode, Episode):
            raise BadEpisode(f"rollout must return an Episode, got {type(episode).__name__}")
        length = len(episode.prompt_ids) + episode.num_tokens
        if length > self._config.training.seq_len:
            raise TooLong(f"an episode of {length} tokens exceeds training.seq_len {self._config.training.seq_len}")
        if not episode.loss_mask.any():
            raise BadEpisode("an episode without a single sampled token cannot be trained on")
        if episode.finish_reason == "abort":
            raise Aborted("an aborted completion is never trained on")

    def _log(self, lease: Lease, error: Exception) -> None:
        self._failures += 1
        if self._failures > LOGGED_FAILURES:
            return
        with_traceback = _reason(error) == "rollout_error"
        log.warning(
            "prompt %d is dropped: %s", lease.prompt.id, _in_words(error), exc_info=error if with_traceback else None
        )


def _reason(error: Exception) -> str:
    return next(reason for kind, reason in REASONS if isinstance(error, kind))


def _in_words(error: Exception) -> str:
    """The error in one line that can travel; an exception that is not ours names its kind."""
    lines = traceback.format_exception_only(error)  # also of an exception whose own str() raises
    text = " ".join("".join(lines).encode("utf-8", "backslashreplace").decode().split())  # also of halves of characters
    return text.partition(": ")[2] or text if type(error).__module__.startswith("asyncrl") else text
