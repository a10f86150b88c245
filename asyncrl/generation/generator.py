"""A generator: the process that samples. One asyncio loop runs the engine's front, the rollouts, the weight follower
and the heartbeats; the first of them to fail ends the process with its traceback.

Started by `asyncrl train --role generator`, here or on another machine; it needs the run folder's configuration and the
replay server's address, nothing else. It holds no dataset state, so it can come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from math import inf
from secrets import token_hex
from typing import Any

from asyncrl.chat import Chat
from asyncrl.config import Config
from asyncrl.fingerprint import fingerprint
from asyncrl.generation.engine import Engine
from asyncrl.generation.periodic import PeriodicEvaluation
from asyncrl.generation.rewards import RewardPool
from asyncrl.generation.rollout import RolloutLoop
from asyncrl.generation.traced import Traced
from asyncrl.metrics import open_timer
from asyncrl.models import load_tokenizer
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.dealer import Address
from asyncrl.replay.keys import CurveKeys, load_keys
from asyncrl.settings import Run
from asyncrl.weights.follower import follow

log = logging.getLogger(__name__)
LEAVE_S = 2.0
"""How long the last words to the replay server may take."""


def main(run: Run, index: int, address: Address) -> None:
    """The process. Returns when the run is finished or on SIGTERM; raises the first failure."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(_until_terminated(run, index, address))
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    """The failure itself, out of the groups that TaskGroups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _until_terminated(run: Run, index: int, address: Address) -> None:
    serving = asyncio.ensure_future(serve(run, index, address))
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        serving.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await serving
    except asyncio.CancelledError:
        if not terminated:
            raise


async def serve(run: Run, index: int, address: Address) -> None:
    """Consumes leases and weights until the run is finished; waits for either; is unblocked by the replay server and
    the trainer; produces groups. Leases nothing before the first weights serve.
    """
    async with contextlib.AsyncExitStack() as stack:
        curve = load_keys(run.config.replay.keys, "client")
        client = await stack.enter_async_context(_client(run.config, index, address, curve))
        engine = Traced(make_engine(run, index), open_timer(run, role="generator", index=index))
        stack.push_async_callback(engine.close)
        helpers = await stack.enter_async_context(_helpers())
        life = Life(patience_s=run.config.supervise.start_timeout_s)
        helpers(_heartbeats(client, engine, run.config.supervise.heartbeat_s, life))
        rewards = _reward_pool(run.config)
        stack.push_async_callback(rewards.close)
        await asyncio.gather(engine.start(), rewards.start())
        chat = Chat.of(run.config, load_tokenizer(run.config.model.path))
        evaluation = PeriodicEvaluation(run, engine=engine, chat=chat)
        if run.config.eval.every and index == 0:
            helpers(evaluation.run())
        weights = _first_weights(run.config, client, engine, index, helpers, evaluation.due)
        if not await _unless(life.over, weights):
            log.info("generator %d ends: the run was over before weights came", index)
            return
        await RolloutLoop(
            engine=engine,
            env=run.env,
            algo=run.algo,
            client=client,
            chat=chat,
            config=run.config,
            score=rewards.score,
        ).run()
        await evaluation.finish(run.config.supervise.stop_timeout_s / 2)


@contextlib.asynccontextmanager
async def _client(
    config: Config, index: int, address: Address, curve: CurveKeys | None
) -> AsyncIterator[AsyncReplayClient]:
    client = AsyncReplayClient(address, index=index, curve=curve, run=fingerprint(config))
    try:
        await client.hello()
        yield client
    finally:
        with contextlib.suppress(TimeoutError, RuntimeError, ValueError):  # the leases expire by themselves, later
            await asyncio.wait_for(client.leave(), LEAVE_S)
        client.close()


@contextlib.asynccontextmanager
async def _helpers() -> AsyncIterator[Callable]:
    """Endless tasks beside the rollouts: one that fails ends the block; all are cancelled at its end."""
    async with asyncio.TaskGroup() as group:
        started: list[asyncio.Task] = []
        yield lambda coroutine: started.append(group.create_task(coroutine))
        for task in started:
            task.cancel()


class Life:
    """Whether the run is over, as the replay server's answers to heartbeats say.

    Until its trainer is there, a run that is resumed looks as finished as it was: it gets `patience_s`.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._begun, self._since = False, time.monotonic()
        self._patience_s = patience_s
        self.over = asyncio.Event()

    def hear(self, goes_on: bool) -> None:
        self._begun = self._begun or goes_on
        if not goes_on and (self._begun or time.monotonic() - self._since > self._patience_s):
            self.over.set()


async def _heartbeats(client: AsyncReplayClient, engine: Engine, every_s: float, life: Life) -> None:
    """Tell the server each `every_s` what the engine has done; renews the leases."""
    while True:
        life.hear(await client.heartbeat(engine.activity()))
        await asyncio.sleep(every_s)


async def _unless(over: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`; False when `over` came first. Raises what the work raises."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        return task.done()
    finally:
        task.cancel()
        end.cancel()


async def _first_weights(
    config: Config,
    client: AsyncReplayClient,
    engine: Engine,
    index: int,
    helpers: Callable,
    on_version: Callable[[int], None],
) -> None:
    """Follow the trainer's sender, and wait until it has sent a first version. Raises TimeoutError."""
    limit_s = config.supervise.stall_limit_s
    served = asyncio.Event()

    def serves(version: int) -> None:
        served.set()
        on_version(version)

    sender = await client.lookup("weights", limit_s)
    helpers(_follow_announced(config, client, engine, index, serves))
    try:
        await asyncio.wait_for(served.wait(), limit_s)
    except TimeoutError:
        raise TimeoutError(f"the trainer at {sender} has sent no weights within {limit_s:.0f} s") from None


async def _follow_announced(
    config: Config, client: AsyncReplayClient, engine: Engine, index: int, on_version: Callable[[int], None]
) -> None:
    """Follow the sender that is announced. Consumes announcements; waits for one, each heartbeat; is unblocked by a
    trainer that has started again, whose sender listens elsewhere; produces nothing itself. Ends as `follow` does.
    """
    curve, address, following = load_keys(config.replay.keys, "client"), "", None
    async with asyncio.TaskGroup() as tasks:
        while True:
            announced = await client.lookup("weights", inf)
            if announced != address:
                if following is not None:
                    log.warning(
                        "generator %d: weights come from %s now, and no longer from %s", index, announced, address
                    )
                    following.cancel()
                    await asyncio.wait({following})  # what it has received is discarded
                address, incarnation = announced, token_hex(8)
                following = tasks.create_task(
                    follow(
                        address,
                        engine,
                        index=index,
                        incarnation=incarnation,
                        config=config.weights,
                        on_version=on_version,
                        curve=curve,
                    )
                )
            await asyncio.sleep(config.supervise.heartbeat_s)


def make_engine(run: Run, index: int) -> Engine:
    """The engine that `generation.engine` names. Raises ValueError when it is not installed."""
    if choose_engine(run.config.generation.engine) == "vllm":
        from asyncrl.generation.vllm import VLLMEngine

        return VLLMEngine(run, index)
    from asyncrl.generation.local import LocalEngine

    return LocalEngine.of_config(run.config)


def choose_engine(name: str) -> str:
    """`auto`: vLLM when it and a GPU are there, the local engine otherwise."""
    if name == "local":
        return "local"
    installed = importlib.util.find_spec("vllm") is not None
    if name == "vllm":
        if not installed:
            raise ValueError("generation.engine is vllm, which is not installed: pip install 'asyncrl[vllm]', or local")
        return "vllm"
    import torch

    return "vllm" if installed and torch.cuda.is_available() else "local"


def _reward_pool(config: Config) -> RewardPool:
    assert config.run_dir is not None, "resolve() sets it"
    return RewardPool(
        config.run_dir,
        num_workers=config.generation.reward_workers,
        timeout_s=config.generation.reward_timeout_s,
        start_timeout_s=config.supervise.start_timeout_s,
    )
