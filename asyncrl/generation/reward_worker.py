"""A reward worker: one process that builds the run's environment and scores what it is sent, one text at a time.

`rewards.py` starts it as `python -m asyncrl.generation.reward_worker RUN_DIR` and speaks with it through its standard
input and output: length-prefixed msgpack. It keeps no time; whoever started it kills it when a score takes too long.
It is killed with its parent and ends when its input does. What a score leaks, hangs in or crashes stays here.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from asyncrl.env import Env, Score, checked
from asyncrl.settings import load_run
from asyncrl.types import Prompt

HEADER = 4
"""Bytes of the length in front of each message."""
MAX_BYTES = 1 << 28
_PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, tag=True):
    """Score this response."""

    text: str
    prompt: Prompt


class Ready(msgspec.Struct, tag=True):
    """The environment is built."""


class Scored(msgspec.Struct, tag=True):
    score: float | dict[str, float]


class Unscored(msgspec.Struct, tag=True):
    """The score raised, or gave something that is no reward."""

    reason: str


Answer = Ready | Scored | Unscored
ANSWER = msgspec.msgpack.Decoder(Answer)


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


def length(header: bytes) -> int:
    """The announced length. Raises ValueError when nothing of ours could be that long."""
    size = int.from_bytes(header, "little")
    if size > MAX_BYTES:
        raise ValueError(f"a reward message of {size} bytes was announced; at most {MAX_BYTES} are allowed")
    return size


def main(run_dir: str) -> None:
    """Consumes tasks; waits for the next; is unblocked by it or by the end of input; produces one answer each."""
    _die_with_parent()
    tasks, answers = _take_standard_streams()
    env = load_run(run_dir).env
    decoder = msgspec.msgpack.Decoder(Task)
    with asyncio.Runner() as runner:  # one loop for all async scores: clients that they keep stay usable
        _send(answers, Ready())
        while header := tasks.read(HEADER):
            task = decoder.decode(tasks.read(length(header)))
            _send(answers, _answer(env, task, runner))


def _answer(env: Env, task: Task, runner: asyncio.Runner) -> Scored | Unscored:
    try:
        return Scored(score=checked(_score(env, task, runner)))
    except Exception as error:  # noqa: BLE001 the boundary to an environment's code: its failure is data
        return Unscored(reason=f"{type(error).__name__}: {error}")


def _score(env: Env, task: Task, runner: asyncio.Runner) -> Score:
    score: Any = env.score(task.text, task.prompt)
    if not inspect.isawaitable(score):
        return score

    async def awaited() -> Score:
        return await score

    return runner.run(awaited())


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep both pipes for messages: what a score prints goes to stderr, and reading from stdin finds nothing."""
    tasks = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return tasks, answers


def _send(answers: BinaryIO, message: Answer) -> None:
    answers.write(frame(message))
    answers.flush()


def _die_with_parent() -> None:
    """Linux: a score that hangs would not notice that the generator was killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
