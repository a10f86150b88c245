r"""Gymnasium environments played by text: `--env gymnasium:FrozenLake-v1`. Multi-turn; observations are masked.

What the policy is shown is the observation if it is text, else the environment's own text rendering (`ansi`), else the
observation printed. What it replies is an action: the number of one (discrete action spaces), or the reply itself (text
action spaces); other action spaces are refused at start-up. The reward is the sum of the environment's rewards.

Packages that register environments are named as gymnasium does: `gymnasium:my_package:MyEnv-v0`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

import msgspec

from asyncrl.env import Conversation, Env, Generate, variant
from asyncrl.extras import require
from asyncrl.registry import register_env
from asyncrl.rewards.answers import find, last_number, without_thinking
from asyncrl.types import Episode, Message, Prompt

_COLOUR = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)


@register_env("gymnasium")
class Gymnasium(Env):
    """A gymnasium environment with text or discrete actions, by id: gymnasium:FrozenLake-v1."""

    tiny: ClassVar[dict[str, Any]] = {"training": {"seq_len": 2048}}

    id: str = ""
    """Id of the environment; `gymnasium:ID` sets it."""
    max_turns: int = 20
    """Actions per episode."""
    instruction: str = ""
    """Rules in words, shown first; gymnasium has none to offer."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of gymnasium.make, such as {is_slippery: false}."""

    @classmethod
    def parametrised(cls, id: str) -> type[Gymnasium]:
        """The class for one environment."""
        return variant(cls, f"The gymnasium environment {id}.", id=id)

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            yield Prompt(id=index, prompt=f"{self.id}, episode {index}", metadata={"seed": self._seed(index)})

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        world = self._make()
        try:
            observation, _ = await asyncio.to_thread(world.reset, seed=prompt.metadata["seed"])
            talk = Conversation(generate, self._opening(world, observation))
            total, invalid = 0.0, 0
            for _ in range(self.max_turns):
                action = as_action(world.action_space, (await talk.generate()).text)
                if talk.truncated:
                    break
                if action is None:
                    invalid += 1
                    talk.reply(f"That is no action. {self._actions(world)}")
                    continue
                observation, reward, ended, cut, _ = await asyncio.to_thread(world.step, action)
                total += float(reward)
                if ended or cut:
                    break
                talk.reply(_shown(world, observation))
            return talk.episode(total, invalid=invalid)
        finally:
            world.close()

    def check(self) -> None:
        world = self._make()
        try:
            self._actions(world)
            world.reset(seed=self._seed(0))
        finally:
            world.close()

    def _seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % (1 << 31)

    def _opening(self, world: Any, observation: Any) -> list[Message]:
        parts = [self.instruction, self._actions(world), _shown(world, observation)]
        return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    def _actions(self, world: Any) -> str:
        kind = type(world.action_space).__name__
        if kind == "Discrete":
            first = int(world.action_space.start)
            last = first + int(world.action_space.n) - 1
            return f"Reply with the number of an action, {first} to {last}."
        if kind == "Text":
            return "Reply with your action."
        raise ValueError(f"gymnasium:{self.id} has a {kind} action space; only Discrete and Text can be played by text")

    def _make(self) -> Any:
        """The environment, rendering as text where it can. Raises ValueError for an id that gymnasium does not know."""
        gym = require("gymnasium", extra="gymnasium", wanted_by=f"environment gymnasium:{self.id or 'ID'}")
        try:
            modes = gym.spec(self.id).kwargs.get("render_modes") or _render_modes(gym, self.id)
            rendering = {"render_mode": "ansi"} if "ansi" in modes else {}
            return gym.make(self.id, **{**rendering, **self.options})
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"gymnasium:{self.id}: {str(error).splitlines()[0]}") from error


def _render_modes(gym: Any, id: str) -> list[str]:
    entry = gym.spec(id).entry_point
    cls = gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return (getattr(cls, "metadata", None) or {}).get("render_modes", [])


def _shown(world: Any, observation: Any) -> str:
    """An observation as text. Terminal colours, which mark a position, become brackets."""
    if isinstance(observation, str):
        return observation
    picture = world.render() if world.render_mode == "ansi" else None
    return _COLOUR.sub(r"[\1]", picture).strip() if isinstance(picture, str) else f"Observation: {observation}"


def as_action(space: Any, text: str) -> Any:
    """A reply -> an action of the space, or None when it is none."""
    marked = find(text)
    reply = marked if marked is not None else without_thinking(text).strip()
    if type(space).__name__ == "Text":
        return reply or None
    number = last_number(reply)
    if number is None or not number.lstrip("+-").isdigit() or len(number) > 9:
        return None
    return int(number) if space.contains(int(number)) else None
