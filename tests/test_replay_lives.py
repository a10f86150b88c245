"""The server while processes come and go: generators that die or leave, a server and a trainer that restart."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from replay_helpers import answer, make_group, make_run, run_async, serving

from asyncrl.config import SuperviseConfig
from asyncrl.replay import server
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import TakeTimeout


def _lease_and_hang(address: str, leased: object) -> None:
    async def work(client: AsyncReplayClient) -> None:
        await client.hello()
        await client.lease(2)
        leased.set()  # type: ignore[attr-defined]
        await asyncio.sleep(60)

    run_async(work, address)


def test_generator_killed_in_mid_lease_loses_it_to_another(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=0)
    run.config.supervise = SuperviseConfig(dead_after_s=2.5)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        spawn = multiprocessing.get_context("spawn")
        leased = spawn.Event()
        victim = spawn.Process(target=_lease_and_hang, args=(made.address, leased))
        victim.start()
        assert leased.wait(30)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)

        async def take_over(client: AsyncReplayClient) -> None:
            await client.hello()
            leases = await client.lease(2)
            while len(leases) < 2:
                leases += await client.lease(2)
            assert [(lease.prompt.id, lease.attempt) for lease in leases] == [(0, 1), (1, 1)]
            await answer(client, leases)

        run_async(take_over, made.address, index=1)
        taken = trainer.take(step=1, num_groups=2, version=0, timeout_s=10)
        assert taken.metrics["dropped/expired"] == 2
        assert taken.metrics["ledger/balance"] == 0
        trainer.close()


def test_replacement_takes_the_leases_at_once_and_the_former_is_refused(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def former(client: AsyncReplayClient) -> None:
            await client.hello()
            (lease,) = await client.lease(1)
            replacement = AsyncReplayClient(made.address)
            await replacement.hello()
            (again,) = await replacement.lease(1)
            assert again.prompt == lease.prompt
            replacement.close()
            with pytest.raises(ValueError, match="give every generator its own --index"):
                await client.insert(make_group(lease.id, versions=[0]))

        run_async(former, made.address)
        trainer.close()


def test_generator_that_leaves_frees_its_leases(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            await client.lease(1)
            await client.leave()

        run_async(work, made.address)
        assert trainer.status()["room"] == 1
        trainer.close()


def test_run_without_generators_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)
    run.config.supervise = SuperviseConfig(grace_s=0.3, start_timeout_s=0.3)

    def work() -> None:
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)
            with pytest.raises(RuntimeError, match="no generator has said hello yet"):
                trainer.take(step=1, num_groups=1, version=0, timeout_s=20)
            trainer.close()

    with pytest.raises(RuntimeError, match="no generator has been alive"):
        work()


def test_a_resumed_run_gives_its_generators_as_long_to_start_as_a_new_one(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        assert run_async(lambda client: client.lease(1), made.address)
        trainer.close()
    run.config.supervise = SuperviseConfig(grace_s=0.1, start_timeout_s=60.0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.rewind(step=0, version=0)
        trainer.publish(version=0, step=0)
        with pytest.raises(TakeTimeout):
            trainer.take(step=1, num_groups=1, version=0, timeout_s=0.5)
        trainer.close()


def test_server_that_restarts_in_place_goes_on_where_it_was(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=0)

    async def work(client: AsyncReplayClient) -> None:
        with serving(run, bind=address):
            await client.hello()
            leases = await client.lease(2)
            while len(leases) < 2:
                leases += await client.lease(1)
            await answer(client, leases[:1])
        with serving(run, bind=address):
            await client.heartbeat({})
            await answer(client, leases)  # one of them a second time
            taken = await asyncio.to_thread(trainer.take, step=1, num_groups=2, version=0, timeout_s=10)
            assert [g.lease_id for g in taken.groups] == [lease.id for lease in leases]
            await asyncio.to_thread(trainer.publish, version=1, step=1)

    with serving(run) as made:
        address = made.address
        trainer = ReplayClient(address, role="trainer")
        trainer.announce("weights", "here")
        trainer.publish(version=0, step=0)
    run_async(work, address)
    with serving(run, bind=address):
        assert trainer.lookup("weights", 5) == "here"
        again = trainer.take(step=1, num_groups=2, version=0, timeout_s=10)
        assert len(again.groups) == 2
        assert trainer.status()["version"] == 1
    trainer.close()


def test_resumed_trainer_finds_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 4}, target_lag=1)

    def train(made: server.Server, start: int, stop: int) -> list[int]:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.rewind(step=start, version=start)
        trainer.publish(version=start, step=start)
        prompts = []

        async def work(client: AsyncReplayClient) -> None:
            generating = asyncio.create_task(generate(client))
            for step in range(start + 1, stop + 1):
                taken = await asyncio.to_thread(trainer.take, step=step, num_groups=1, version=step - 1, timeout_s=10)
                prompts.extend(g.prompt.id for g in taken.groups)
                assert all(0 <= step - 1 - v <= 1 for g in taken.groups for v in g.episodes[0].versions)
                await asyncio.to_thread(trainer.publish, version=step, step=step)
            await asyncio.to_thread(trainer.finish, "enough")
            await generating

        run_async(work, made.address)
        trainer.close()
        return prompts

    async def generate(client: AsyncReplayClient) -> None:
        while leases := await client.lease(1):
            await answer(client, leases)

    with serving(run) as made:
        assert train(made, 0, 3) == [0, 1, 2]
    for _ in range(2):  # the second time it is resumed twice from the same checkpoint
        with serving(run) as made:
            assert train(made, 2, 4) == [2, 3]
            status = ReplayClient(made.address, role="status")
            assert status.status()["ledger"]["ledger/balance"] == 0
            status.close()


def test_without_a_journal_a_resumed_trainer_goes_on_with_the_next_prompts(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=0, journal=False)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.rewind(step=3, version=3)
        with pytest.raises(ValueError, match="version 0 cannot go live after version 3"):
            trainer.publish(version=0, step=0)
        trainer.publish(version=3, step=3)

        async def work(client: AsyncReplayClient) -> None:
            assert [lease.prompt.id for lease in await client.lease(2)] == [6, 7]

        run_async(work, made.address)
        assert trainer.status()["ledger"]["ledger/balance"] == 0
        trainer.close()
    assert not (tmp_path / "replay").exists()


def test_server_process_writes_its_address_and_ends_when_told(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1}, journal=False)
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    process = spawn.Process(target=server.serve, args=(run, stop))
    process.start()
    address = server.read_address(tmp_path, timeout_s=30)
    client = ReplayClient(address, role="status")
    assert client.status(timeout_s=20)["run"] == "run"
    client.close()
    stop.set()
    process.join(20)
    assert process.exitcode == 0
    assert msgspec.json.decode((tmp_path / "address.json").read_bytes())["pid"] == process.pid


def test_without_a_journal_no_lease_gets_the_number_of_one_from_before_a_restart(tmp_path: Path) -> None:
    """The generator lives on."""
    run = make_run(str(tmp_path), training={"batch_size": 2, "steps": 9}, target_lag=0, journal=False)
    with serving(run) as made:
        address = made.address
        _publish(address)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            former = await client.lease(2)
            await client.drop(former[0].id, "filtered")
            former += await client.lease(1)
            assert [lease.prompt.id for lease in former] == [0, 1, 2]
            await asyncio.to_thread(leave.set)
            await asyncio.to_thread(there.wait, 20)
            leases = await client.lease(2)
            assert [lease.prompt.id for lease in leases] == [0, 1]
            for lease in former:
                assert not await client.insert(make_group(lease.id, versions=[0], prompt_id=lease.prompt.id))
                await client.drop(lease.id, "filtered")
            await answer(client, leases)

        leave, there = threading.Event(), threading.Event()
        generator = threading.Thread(target=run_async, args=(work, address))
        generator.start()
        assert leave.wait(20)
    with serving(run, bind=address) as made:
        _publish(address)
        there.set()
        generator.join(30)
        buffered = [seat.prompt.id for seat in made.service.buffer.buffered.values()]
        assert buffered == [0, 1]
        assert made.service.buffer.accounts()["ledger/balance"] == 0


def _publish(address: str) -> None:
    trainer = ReplayClient(address, role="trainer")
    trainer.rewind(step=0, version=0)
    trainer.publish(version=0, step=0)
    trainer.close()


def test_address_of_a_trainer_from_before_a_restart_is_not_given_out(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1})
    with serving(run) as made:
        former = ReplayClient(made.address, role="trainer")
        former.announce("weights", "gone")
        former.close()

    async def look(client: AsyncReplayClient) -> None:
        assert (await client.hello()).announced == {}
        looking = asyncio.create_task(client.lookup("weights", 20))
        trainer = ReplayClient(client.address, role="trainer")
        await asyncio.to_thread(trainer.rewind, step=0, version=0)
        await asyncio.to_thread(trainer.announce, "weights", "here")
        assert await looking == "here"
        trainer.close()

    with serving(run) as made:
        run_async(look, made.address)
