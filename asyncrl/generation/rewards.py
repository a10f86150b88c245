"""The reward pool of a generator: environments score in processes of their own, and a clock runs beside them.

Behind `generate.score`. A score that hangs is killed with its process, which is started again; one that raises, crashes
or gives no finite number fails that one response. Nothing here knows what a reward means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.env import Score
from asyncrl.generation.reward_worker import ANSWER, HEADER, Answer, Ready, Scored, Task, Unscored, frame, length
from asyncrl.types import Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")


class RewardError(RuntimeError):
    """The score raised, crashed its process, or gave something that is no reward."""


class RewardTimeout(RuntimeError):
    """The score took longer than `generation.reward_timeout_s`."""


class RewardPool:
    """`num_workers` processes that score one response each at a time."""

    def __init__(self, run_dir: str | Path, *, num_workers: int, timeout_s: float, start_timeout_s: float) -> None:
        self._run_dir, self._timeout_s, self._start_timeout_s = str(run_dir), timeout_s, start_timeout_s
        self._num_workers = num_workers
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    async def start(self) -> None:
        """Start every worker. Raises RuntimeError when one cannot build the environment."""
        self._workers = {_Worker(self._run_dir) for _ in range(self._num_workers)}
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.start(self._start_timeout_s))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, text: str, prompt: Prompt) -> Score:
        """`Env.score` of a response. Waits for an idle worker first, which the timeout does not count.

        Raises RewardTimeout or RewardError.
        """
        worker = await self._idle.get()
        # Shielded: a caller that is cancelled loses interest, but the worker's answer must not meet the next task.
        return await asyncio.shield(self._keep(self._score(worker, Task(text=text, prompt=prompt))))

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the pool's own, whose failure counts as seen also when nobody waits for it any more."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return task

    async def _score(self, worker: _Worker, task: Task) -> Score:
        who = f"the reward of prompt {task.prompt.id}"
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(task)
        except TimeoutError:
            worker.kill()
            raise RewardTimeout(f"{who} took longer than {self._timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise RewardError(f"{who} ended its process with code {await worker.wait()}") from None
        finally:
            self._return(worker)
        if isinstance(answer, Unscored):
            raise RewardError(f"{who} failed: {answer.reason}")
        assert isinstance(answer, Scored)
        return answer.score

    def _return(self, worker: _Worker) -> None:
        """To the idle ones; a dead one is started again first, while the others score."""
        if worker.alive:
            self._idle.put_nowait(worker)
        elif not self._closed:
            self._keep(self._restart(worker))

    async def _restart(self, worker: _Worker) -> None:
        try:
            await worker.start(self._start_timeout_s)
        except RuntimeError as error:  # the next score finds a dead process, fails, and has it started once more
            log.warning("%s", error)
        self._idle.put_nowait(worker)

    async def close(self) -> None:
        """Kill the workers; scores that run are lost."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            await worker.wait()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self._killed

    async def start(self, timeout_s: float) -> None:
        """Start, or start again, and wait until its environment is built. Raises RuntimeError."""
        await self.wait()
        command = (sys.executable, "-m", "asyncrl.generation.reward_worker", self._run_dir)
        pipe, self._killed = asyncio.subprocess.PIPE, False
        # A session of its own: what a score has started is killed together with it.
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._read()
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            self.kill()
            code = await self.wait()
            raise RuntimeError(f"a reward worker did not start (exit code {code}): see this process's log") from error
        assert isinstance(answer, Ready)

    async def ask(self, task: Task) -> Answer:
        """Raises IncompleteReadError or ConnectionError when the process ends instead of answering."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(task))
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        size = length(await self._process.stdout.readexactly(HEADER))
        return ANSWER.decode(await self._process.stdout.readexactly(size))

    def kill(self) -> None:
        """Kill the process and what it has started, at once."""
        if self._process is not None and self.alive:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        """Wait for the end of the process, if there is one; its exit code."""
        return None if self._process is None else await self._process.wait()
