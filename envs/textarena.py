"""TextArena games: `--env textarena:GuessTheNumber-v0`. Multi-turn, observations masked; several players as self-play.

The policy plays one seat, which changes from prompt to prompt; in games for several it plays the other seats too, as
itself, and only the tokens of the one seat are trained. The reward is the game's own for that seat. TextArena draws
from Python's global source of randomness, so within a game only the start is fixed by the seed. Word games want word
lists that NLTK downloads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from asyncrl.env import Conversation, Env, Generate, variant
from asyncrl.extras import require
from asyncrl.registry import register_env
from asyncrl.types import Episode, Message, Prompt


@register_env("textarena")
class TextArena(Env):
    """A TextArena game, by id: textarena:GuessTheNumber-v0."""

    tiny: ClassVar[dict[str, Any]] = {"training": {"seq_len": 2048}}

    id: str = ""
    """Id of the game; `textarena:ID` sets it."""
    players: int = 1
    """Seats of the game."""
    max_turns: int = 50
    """Turns of all seats together."""

    @classmethod
    def parametrised(cls, id: str) -> type[TextArena]:
        """The class for one game."""
        return variant(cls, f"The TextArena game {id}.", id=id)

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        for index in count(start):
            metadata = {"seed": self._seed(index), "seat": index % self.players}
            yield Prompt(id=index, prompt=f"{self.id}, game {index}", metadata=metadata)

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        seat, game = prompt.metadata["seat"], self._start(prompt.metadata["seed"])
        seats: dict[int, Conversation] = {}
        turns, done = 0, False
        while not done and turns < self.max_turns:
            player, messages = game.get_observation()
            _observe(seats, player, _as_text(messages, player), generate)
            text = (await seats[player].generate()).text
            if seats[player].truncated and player == seat:
                break
            done, _ = game.step(text)
            turns += 1
        rewards, info = game.close() if done else (None, {})
        if seat not in seats:  # the game ended before this seat's first turn: there is nothing to train
            raise RuntimeError(f"{self.id} ended before seat {seat} had a turn")
        reason = str((info or {}).get(seat, {}).get("reason", ""))
        return seats[seat].episode(float((rewards or {}).get(seat, 0.0)), turns=turns, finished=done, reason=reason)

    def check(self) -> None:
        self._start(self._seed(0)).get_observation()

    def _seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % (1 << 31)

    def _start(self, seed: int) -> Any:
        """A game at its start, in the variant that gives messages one by one. Raises ValueError when it cannot be."""
        arena = require("textarena", extra="textarena", wanted_by=f"environment textarena:{self.id or 'ID'}")
        try:
            game = arena.make(f"{self.id}-raw")
            game.reset(num_players=self.players, seed=seed)
            return game
        except (ValueError, AssertionError, LookupError, TypeError) as error:
            lines = [line.strip(" *") for line in str(error).splitlines() if line.strip(" *")]
            raise ValueError(f"textarena:{self.id}: {lines[0] if lines else type(error).__name__}") from error


def _observe(seats: dict[int, Conversation], player: int, text: str, generate: Generate) -> None:
    if player in seats:
        seats[player].reply(text)
    else:
        opening: list[Message] = [{"role": "user", "content": text}]
        seats[player] = Conversation(generate, opening)


def _as_text(messages: list[tuple[int, str, Any]], player: int) -> str:
    """New messages of the game and of other seats; a seat's own words are in its conversation already."""
    others = [(sender, text.strip()) for sender, text, _ in messages if sender != player]
    return "\n".join(text if sender < 0 else f"[Player {sender}] {text}" for sender, text in others)
