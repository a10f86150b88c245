"""The server over real sockets: parking, retries, silence, restarts, processes that are killed."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import zmq
from replay_helpers import answer, make_run, run_async, serving

from asyncrl.replay import messages, server, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import Session, TakeTimeout
from asyncrl.replay.seal import unseal


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
            session = Session("generator", 0, "")
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
            session = Session("generator", 0, "")
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
            session = Session("status", 0, "")
            for _ in range(3000):
                slow.send_multipart(session.pack(session.begin(), messages.Status()))
            other = ReplayClient(made.address, role="trainer")
            start = time.monotonic()
            other.publish(version=0, step=0)
            assert other.status(timeout_s=20)["version"] == 0
            assert time.monotonic() - start < 20
            other.close()
        context.term()


def test_address_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asyncrl keys new"):
        server.open_server(make_run(str(tmp_path)), bind="tcp://0.0.0.0:*")


def test_request_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with serving(make_run(str(tmp_path))) as made:

        async def work(client: AsyncReplayClient) -> None:
            with pytest.raises(ValueError, match="malformed message"):
                await client.lease(0)
            with pytest.raises(ValueError, match="malformed message"):
                await client.drop(0, "No such Reason!")

        run_async(work, made.address)
