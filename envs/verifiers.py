"""Environments of the verifiers library (its v1 API), run through their own rollout: `--env verifiers:my_taskset`.

The id is that of an installed package which exports a Taskset. Its harness, scoring and turns are verifiers' own; each
request its harness makes for the policy is answered by our generator behind an OpenAI-compatible endpoint on loopback,
tokens in and tokens out. Limits: one agent per environment, text replies (no native tool calls), and the harness
programs are started with `uv` in a subprocess each, which takes seconds per rollout.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from asyncrl.endpoint import Endpoint
from asyncrl.env import Env, Generate, seeded, variant
from asyncrl.extras import require
from asyncrl.registry import register_env
from asyncrl.types import Episode, Message, Prompt


class Host(NamedTuple):
    """What serves the rollouts of one event loop."""

    world: Any
    """verifiers' own Env."""
    endpoint: Endpoint
    stop: asyncio.Event
    task: asyncio.Task[None]


_HOSTS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Host]]] = WeakKeyDictionary()


@register_env("verifiers")
class Verifiers(Env):
    """An installed environment of the verifiers library, by taskset id: verifiers:ID."""

    tiny: ClassVar[dict[str, Any]] = {"training": {"seq_len": 1024}}

    id: str = ""
    """Id of the taskset; `verifiers:ID` sets it."""
    harness: str = "null"
    """Id of the harness: `null` is a plain chat loop."""
    max_turns: int | None = None
    """Turns per rollout; none: the environment's own."""
    max_tasks: int = 10_000
    """Tasks read from the taskset, which may be endless."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of the taskset's own configuration."""

    @classmethod
    def parametrised(cls, id: str) -> type[Verifiers]:
        """The class for one taskset."""
        return variant(cls, f"The verifiers environment {id}.", id=id)

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        size = len(self._tasks)
        position = start
        while size:
            order = seeded(self.seed, position // size).sample(range(size), size)
            for index in order[position % size :]:
                yield Prompt(id=position, prompt=_asked(self._tasks[index]), metadata={"task": index})
                position += 1

    async def rollout(self, prompt: Prompt, generate: Generate) -> Episode:
        host = await self._host()
        with host.endpoint.session(generate) as (session, headers):
            context = self._vf.ModelContext(
                model="policy",
                client=self._vf.EvalClientConfig(base_url=host.endpoint.url, api_key_var="NONE", headers=headers),
            )
            done = await host.world.run_episode(self._tasks[prompt.metadata["task"]], context)
        if session.error is not None:
            raise session.error
        if not done.ok or session.talk is None:
            raise RuntimeError(f"verifiers:{self.id} failed: {_why(done)}")
        return session.talk.episode(float(done.traces[0].reward), restarts=session.num_restarts)

    def check(self) -> None:
        if not self._tasks:
            raise ValueError(f"verifiers:{self.id} has no tasks")
        if type(self._world()).__name__ != "SingleAgentEnv":
            raise ValueError(
                f"verifiers:{self.id} has several agents; only single-agent environments can be trained on"
            )
        if _uv() is None:
            raise ValueError(f"verifiers:{self.id} starts its harness with uv: pip install uv")

    @cached_property
    def _vf(self) -> Any:
        return require("verifiers.v1", extra="verifiers", wanted_by=f"environment verifiers:{self.id or 'ID'}")

    @cached_property
    def _tasks(self) -> list[Any]:
        tasks = self._world().taskset.take(self.max_tasks)
        return list(tasks)

    def _world(self) -> Any:
        """verifiers' own Env. Raises ValueError when the taskset is not installed or its options are wrong."""
        vf = self._vf
        agent = {"harness": {"id": self.harness}, "runtime": {"type": "subprocess"}, "max_turns": self.max_turns}
        try:
            config = vf.resolve_env_config({"taskset": {"id": self.id, **self.options}, "agent": agent})
            return vf.load_environment(config)
        except (ImportError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"verifiers:{self.id}: {' '.join(str(error).split())}") from error

    async def _host(self) -> Host:
        """Start verifiers' servers and our endpoint, once per event loop."""
        hosts = _HOSTS.setdefault(asyncio.get_running_loop(), {})
        key = msgspec.json.encode(self).decode()
        if key not in hosts:
            hosts[key] = asyncio.ensure_future(self._start())
        return await asyncio.shield(hosts[key])

    async def _start(self) -> Host:
        uv = _uv()
        if uv is not None and shutil.which("uv") is None:
            os.environ["PATH"] = f"{Path(uv).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        world, endpoint, ready, stop = self._world(), Endpoint(), asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            await endpoint.start()
            try:
                async with world.serving():
                    ready.set()
                    await stop.wait()  # until the loop ends and cancels this
            finally:
                await endpoint.close()

        task = asyncio.create_task(serve(), name=f"verifiers:{self.id}")
        starting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, starting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            starting.cancel()
            task.result()
        return Host(world, endpoint, stop, task)


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.exists() else None)


def _asked(task: Any) -> str | list[Message]:
    """What a task asks, for the log: the rollout is verifiers' own."""
    prompt = task.data.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return [{"role": m.role, "content": m.content if isinstance(m.content, str) else ""} for m in prompt]


def _why(done: Any) -> str:
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    return str(errors[0].message) if errors else "it ended without an answer"
