"""The server over real sockets: parking, retries, silence, restarts, processes that are killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from replay_helpers import make_group, make_run, serving

from asyncrl.config import SuperviseConfig
from asyncrl.replay import messages, server, wire
from asyncrl.replay.client import AsyncReplayClient, ReplayClient, Session, TakeTimeout
from asyncrl.replay.messages import Lease
from asyncrl.replay.seal import unseal


def run_async(work: Callable[[AsyncReplayClient], Awaitable[object]], address: str, *, index: int = 0) -> object:
    """One coroutine with a client of its own, bounded."""

    async def main() -> object:
        client = AsyncReplayClient(address, index=index)
        try:
            return await asyncio.wait_for(work(client), 30)
        finally:
            client.close()

    return asyncio.run(main())


async def answer(client: AsyncReplayClient, leases: list[Lease]) -> None:
    for lease in leases:
        assert await client.insert(make_group(lease.id, versions=[lease.version], prompt_id=lease.prompt.id))


def test_groups_travel_from_generator_to_trainer(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2, "steps": 2}, target_lag=1)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        trainer.announce("weights", "tcp://somewhere")

        async def generate(client: AsyncReplayClient) -> None:
            welcome = await client.hello()
            assert (welcome.version, welcome.announced) == (0, {"weights": "tcp://somewhere"})
            assert await client.lookup("weights", 5) == "tcp://somewhere"
            await client.heartbeat({"tokens": 0.0, "busy_s": 0.0})
            leases = await client.lease(3)
            assert [lease.prompt.id for lease in leases] == [0, 1, 2]
            await client.drop(leases[0].id, "filtered", num_tokens=5, reward=0.0, length=5.0)
            await answer(client, leases[1:])

        run_async(generate, made.address)
        taken = trainer.take(step=1, num_groups=2, version=0, timeout_s=10)
        assert [g.prompt.id for g in taken.groups] == [1, 2]
        assert taken.metrics["ledger/balance"] == 0
        assert taken.metrics["dropped/filtered"] == 1
        assert taken.metrics["bias/dropped_length"] == 5
        again = trainer.take(step=1, num_groups=2, version=0, timeout_s=10)
        assert [g.lease_id for g in again.groups] == [g.lease_id for g in taken.groups]
        trainer.close()


def test_a_process_with_two_connections_is_listed_once(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path))) as made:
        first, second = (ReplayClient(made.address, role="trainer") for _ in range(2))
        first.publish(version=0, step=0)
        processes = second.status()["processes"]
        assert [(p["role"], p["pid"]) for p in processes] == [("trainer", os.getpid())]
        first.close()
        second.close()


def test_what_a_drop_says_is_shown_and_ends_a_run_in_which_everything_fails(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=100, capacity_groups=1000, max_filtered=200)

    def work() -> None:
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)

            async def fail(client: AsyncReplayClient) -> None:
                await client.hello()
                for number, lease in enumerate(await client.lease(50)):
                    await client.drop(lease.id, "reward_error", why=f"RuntimeError: boom {number} " + "x" * 9999)
                    if number == 0:
                        status = await asyncio.to_thread(trainer.status)
                        assert status["why_dropped"]["reward_error"].startswith("RuntimeError: boom 0 xxx")

            with pytest.raises(RuntimeError, match="40 reward_error"):
                run_async(fail, made.address)
            trainer.close()

    with pytest.raises(RuntimeError, match=r"40 leases in a row .* the last reward_error: RuntimeError: boom 39"):
        work()


def test_parked_requests_are_answered_by_the_change_they_wait_for(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")

        async def generate(client: AsyncReplayClient) -> list[int]:
            waiting = asyncio.create_task(client.lease(1))
            looking = asyncio.create_task(client.lookup("weights", 20))
            while len(made.service.parked) < 2:  # both are parked
                await asyncio.sleep(0.01)
            await asyncio.to_thread(trainer.announce, "weights", "here")
            assert await looking == "here"
            await asyncio.to_thread(trainer.publish, version=0, step=0)
            await answer(client, await waiting)
            over = asyncio.create_task(client.lease(1))
            taken = await asyncio.to_thread(trainer.take, step=1, num_groups=1, version=0, timeout_s=10)
            await asyncio.to_thread(trainer.finish, "trained")
            assert await over == []
            return [g.prompt.id for g in taken.groups]

        assert run_async(generate, made.address) == [0]
        trainer.close()


def test_take_that_times_out_says_who_could_have_ended_the_wait(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 4}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def lease(client: AsyncReplayClient) -> None:
            await client.hello()
            await answer(client, (await client.lease(4))[:1])

        run_async(lease, made.address)
        with pytest.raises(
            TakeTimeout, match=r"trainer has waited \d s for 3 of 4 groups; 3 groups in flight, the oldest"
        ):
            trainer.take(step=1, num_groups=4, version=0, timeout_s=1.5)
        trainer.close()


def test_refused_request_raises_at_the_client_and_the_server_goes_on(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path), training={"batch_size": 2})) as made:
        trainer = ReplayClient(made.address, role="trainer")
        with pytest.raises(ValueError, match="step 7 cannot be taken after step 0"):
            trainer.take(step=7, num_groups=2, version=0, timeout_s=5)
        assert trainer.status()["step"] == 0
        trainer.close()


def test_broken_invariant_ends_the_server_after_the_trainer_was_told(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1}, target_lag=0)

    def work() -> None:
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)

            async def generate(client: AsyncReplayClient) -> None:
                await answer(client, await client.lease(1))

            run_async(generate, made.address)
            with pytest.raises(RuntimeError, match="max_lag is 0"):
                trainer.take(step=1, num_groups=1, version=9, timeout_s=5)
            trainer.close()

    with pytest.raises(RuntimeError, match="sampled at version 0, 9 versions before"):
        work()


def test_noise_and_strange_requests_are_counted_and_ignored(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path))) as made:
        context = zmq.Context()
        with context.socket(zmq.DEALER) as noise:
            noise.connect(made.address)
            for frames in ([b""], [b"noise"], [wire.PREFIX + b"\xc1"], [b"ARL\xff" + b"\x90"], [b"x"] * 50):
                noise.send_multipart(frames)
            session = Session("generator", 0)
            noise.send_multipart(session.pack(session.begin(), messages.Insert(lease_id=0), [b"x"]))
            assert noise.poll(5000)
            reply = wire.unpack_reply(unseal(noise.recv_multipart())[0])
            assert isinstance(reply.body, messages.Resend)
        context.term()
        client = ReplayClient(made.address, role="status")
        status = client.status()
        assert status["malformed"] == 5
        assert status["ledger"]["ledger/started"] == 0
        client.close()


def test_repeated_and_late_requests_are_answered_once(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 4}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(made.address)
            session = Session("generator", 0)
            ask = session.pack(session.begin(), messages.AskLease(n=2))
            leases = []
            for _ in range(3):
                dealer.send_multipart(ask)
                assert dealer.poll(5000)
                leases.append(wire.unpack_reply(unseal(dealer.recv_multipart())[0]).body)
            assert leases[0] == leases[1] == leases[2]
            session.open.clear()
            dealer.send_multipart(session.pack(session.begin(), messages.Hello()))
            assert dealer.poll(5000)
            dealer.recv_multipart()
            dealer.send_multipart(ask)  # acknowledged long ago: a duplicate that some network kept
            assert not dealer.poll(300)
        context.term()
        assert trainer.status()["ledger"]["ledger/started"] == 2
        trainer.close()


def test_client_that_does_not_read_does_not_hold_up_the_others(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2}, target_lag=1)
    with serving(run) as made:
        context = zmq.Context()
        with context.socket(zmq.DEALER) as slow:
            slow.setsockopt(zmq.RCVHWM, 1)
            slow.setsockopt(zmq.RCVBUF, 4096)
            slow.connect(made.address)
            session = Session("status", 0)
            for _ in range(3000):
                slow.send_multipart(session.pack(session.begin(), messages.Status()))
            other = ReplayClient(made.address, role="trainer")
            start = time.monotonic()
            other.publish(version=0, step=0)
            assert other.status(timeout_s=20)["version"] == 0
            assert time.monotonic() - start < 20
            other.close()
        context.term()


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


def test_address_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asyncrl keys new"):
        server.open_server(make_run(str(tmp_path)), bind="tcp://0.0.0.0:*")


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


def test_request_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path))) as made:

        async def work(client: AsyncReplayClient) -> None:
            with pytest.raises(ValueError, match="malformed message"):
                await client.lease(0)
            with pytest.raises(ValueError, match="malformed message"):
                await client.drop(0, "No such Reason!")

        run_async(work, made.address)
