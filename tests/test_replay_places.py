"""Two processes that want to be the same generator: who lives keeps its place, who is dead or silent loses it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from replay_helpers import make_run, run_async, serving

from asyncrl.config import SuperviseConfig
from asyncrl.replay import diagnosis
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import NoPlace
from asyncrl.status import _server_lines


def _live(address: str, beats: object, said: object) -> None:
    """A generator that does nothing but say that it lives, and what it is told at its end."""

    async def work(client: AsyncReplayClient) -> None:
        await client.hello()
        while True:
            await client.heartbeat({})
            beats.set()  # type: ignore[attr-defined]
            await asyncio.sleep(0.2)

    try:
        run_async(work, address)
    except NoPlace as error:
        said.put(str(error))  # type: ignore[attr-defined]


@contextmanager
def generator(address: str) -> Iterator[tuple]:
    """Another process that is generator 0."""
    spawn = multiprocessing.get_context("spawn")
    beats, said = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=_live, args=(address, beats, said))
    process.start()
    try:
        assert beats.wait(30)
        yield process, beats, said
    finally:
        process.kill()
        process.join(10)


def hello(address: str) -> None:
    run_async(lambda client: client.hello(), address)


def test_a_newcomer_is_refused_the_index_of_a_generator_that_lives(tmp_path: Path):
    with serving(make_run(str(tmp_path))) as made, generator(made.address) as (process, beats, said):
        for _ in range(2):  # as a restart loop does
            with pytest.raises(NoPlace, match=f"generator 0 is process {process.pid} on host .* its own --index"):
                hello(made.address)
        beats.clear()
        assert beats.wait(10)
        looks_on = ReplayClient(made.address, role="status")
        lines = [line for line in _server_lines(looks_on.status()) if "generator 0" in line]
        looks_on.close()
        assert len(lines) == 1
        assert said.empty()


def test_a_generator_killed_with_9_makes_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis, "SILENT_S", 3600.0)  # its silence is not what tells
    with serving(make_run(str(tmp_path))) as made, generator(made.address) as (process, _, _):
        os.kill(process.pid, signal.SIGKILL)
        hello(made.address)


def test_a_frozen_generator_loses_its_place_and_ends_with_the_reason_when_it_wakes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(diagnosis, "SILENT_S", 1.0)
    run = make_run(str(tmp_path))
    run.config.supervise = SuperviseConfig(heartbeat_s=0.2)
    with serving(run) as made, generator(made.address) as (process, _, said):
        os.kill(process.pid, signal.SIGSTOP)
        hello(made.address)
        os.kill(process.pid, signal.SIGCONT)
        expected = f"process {os.getpid()} on host "
        assert said.get(timeout=20).startswith(expected)
