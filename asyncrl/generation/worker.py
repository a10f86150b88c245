"""The local engine's thread: it alone touches the model, the cache and the scheduler.

A dedicated thread, and not steps on the asyncio loop: a step of a real model takes tens of milliseconds, in which the
loop would answer no heartbeat, and a slow coroutine of an environment would idle the model. torch releases the lock in
every operation, so the two run side by side; they meet once per step, through one queue each way.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.generation.scheduler import Request, Scheduler
from asyncrl.types import Completion


@dataclass(slots=True, kw_only=True)
class Submit:
    request: Request


@dataclass(slots=True, kw_only=True)
class Abort:
    key: int


@dataclass(slots=True, kw_only=True)
class Swap:
    """Change weights by calling `apply`, then serve them as `version` and report by calling `done(error)`."""

    version: int
    apply: Callable[[], None]
    done: Callable[[Exception | None], None]


@dataclass(slots=True, kw_only=True)
class Stop:
    pass


Command = Submit | Abort | Swap | Stop


class Worker:
    """Runs a scheduler until told to stop. `deliver` gets the completions of each step, on this thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        commands: queue.SimpleQueue[Command],
        deliver: Callable[[list[tuple[int, Completion]]], None],
        on_update: str,
        version: int,
    ) -> None:
        self.version = version
        self.busy_s = 0.0
        self.pause_s = 0.0
        self._scheduler = scheduler
        self._commands = commands
        self._deliver = deliver
        self._on_update = on_update
        self._swap: Swap | None = None
        self._stopping = False

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return self._scheduler.num_tokens

    def run(self) -> None:
        """Consumes commands; waits for one when nothing can run; is unblocked by any; produces completions.

        Raises whatever the model raises: the engine is dead then.
        """
        while not self._stopping:
            self._take_commands()
            if self._swap is not None and not self._must_drain():
                self._change_weights(self._swap)
            if self._can_step():
                self._step()

    def _must_drain(self) -> bool:
        return self._on_update == "drain" and self._scheduler.num_running > 0

    def _can_step(self) -> bool:
        if self.version < 0 or self._stopping:
            return False
        return self._scheduler.num_running > 0 or (self._scheduler.num_waiting > 0 and self._swap is None)

    def _take_commands(self) -> None:
        block = not self._can_step() and self._swap is None
        while block or not self._commands.empty():
            self._apply(self._commands.get())
            block = False

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(request=request):
                self._scheduler.submit(request)
            case Abort(key=key):
                if (completion := self._scheduler.abort(key)) is not None:
                    self._deliver([(key, completion)])
            case Swap():
                assert self._swap is None, "one weight change at a time"
                self._swap = command
            case Stop():
                self._stopping = True

    def _change_weights(self, swap: Swap) -> None:
        began = time.perf_counter()
        self._swap = None
        try:
            swap.apply()
        except (RuntimeError, ValueError) as error:
            swap.done(error)
            return
        self._scheduler.forget_prefills()
        if self._on_update == "recompute":
            self._scheduler.recompute()
        self.version = swap.version
        self.pause_s += time.perf_counter() - began
        swap.done(None)

    def _step(self) -> None:
        began = time.perf_counter()
        done = self._scheduler.step(self.version, admit=self._swap is None)
        self.busy_s += time.perf_counter() - began
        if done:
            self._deliver(done)
