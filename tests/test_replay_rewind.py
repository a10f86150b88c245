"""A trainer that starts again while generators live on: acknowledged groups stay, no lease is taken for another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from replay_helpers import lease_all, make_group, make_parcel, make_run, run_async, serving
from test_replay_journal import open_journal

from asyncrl.replay import frames, messages, server, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import Session
from asyncrl.replay.seal import unseal
from asyncrl.replay.standing import Standing


class Wire:
    """One process of a run whose server is turned by hand: several requests can come in one turn."""

    def __init__(self, context: zmq.Context, made: server.Server, role: str) -> None:
        self.made, self.session = made, Session(role, 0, "")
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(made.address)

    def send(self, body: messages.Request, payload: Sequence[wire.Frame] = ()) -> None:
        self.socket.send_multipart(self.session.pack(self.session.begin(), body, payload))

    def reply(self) -> messages.Reply:
        assert self.socket.poll(10_000)
        return wire.unpack_reply(unseal(frames.receive(self.socket))[0]).body

    def ask(self, body: messages.Request, payload: Sequence[wire.Frame] = ()) -> messages.Reply:
        self.send(body, payload)
        for _ in range(200):  # a turn waits for a message
            self.made.turn()
            if self.socket.poll(0):
                return self.reply()
        raise AssertionError(f"no answer to {body}")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def packed(lease: messages.Lease) -> list[wire.Frame]:
    return wire.pack_group(make_group(lease.id, versions=[lease.version], prompt_id=lease.prompt.id))


def test_the_turn_of_a_rewind_keeps_what_it_acknowledges_and_its_leases_are_not_granted_again(
    tmp_path: Path, context: zmq.Context
) -> None:
    made = server.open_server(
        make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=3), bind="tcp://127.0.0.1:*"
    )
    generator, trainer = Wire(context, made, "generator"), Wire(context, made, "trainer")
    trainer.ask(messages.Publish(version=0, step=0))
    first = generator.ask(messages.AskLease(n=4))
    assert isinstance(first, messages.Leases)
    assert [lease.prompt.id for lease in first.leases] == [0, 1, 2, 3]
    generator.ask(messages.Insert(lease_id=0), packed(first.leases[0]))
    trainer.ask(messages.Take(step=1, num_groups=1, version=0))
    trainer.ask(messages.Publish(version=1, step=1))
    generator.send(messages.Insert(lease_id=1), packed(first.leases[1]))
    generator.send(messages.AskLease(n=1))
    made.service.handle(b"", made._socket.recv_multipart()[1:], 0.0)  # in one turn: both, then the rewind
    made.service.handle(b"", made._socket.recv_multipart()[1:], 0.0)
    (inserted, granted) = (wire.unpack_reply(unseal(message)[0]).body for _, message in made.service.outbox)
    assert inserted == messages.Done(accepted=True)
    assert isinstance(granted, messages.Leases)
    trainer.ask(messages.Rewind(step=1, version=1))
    trainer.ask(messages.Publish(version=1, step=1))
    assert [seat.prompt.id for seat in made.service.buffer.buffered.values()] == [1]
    again = generator.ask(messages.AskLease(n=9))
    assert isinstance(again, messages.Leases)
    assert {lease.id for lease in again.leases}.isdisjoint(lease.id for lease in granted.leases)
    late = generator.ask(messages.Insert(lease_id=granted.leases[0].id), packed(granted.leases[0]))
    assert late == messages.Done(accepted=False)
    assert made.service.buffer.accounts()["ledger/balance"] == 0
    made.close()


@pytest.mark.parametrize("journal", [True, False])
def test_a_group_from_before_the_start_afresh_is_not_taken_for_one_of_another_prompt(
    journal: bool, tmp_path: Path
) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 3, "steps": 9}, target_lag=0, journal=journal)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.rewind(step=0, version=0)
        trainer.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            (first,) = await client.lease(1)
            await client.drop(first.id, "aborted")
            (former,) = await client.lease(1)
            assert (former.prompt.id, former.attempt) == (0, 1)
            await asyncio.to_thread(trainer.rewind, step=0, version=0)
            await asyncio.to_thread(trainer.publish, version=0, step=0)
            leases = await client.lease(3)
            assert not await client.insert(make_group(former.id, versions=[0], prompt_id=0))
            for lease in leases:
                assert await client.insert(make_group(lease.id, versions=[0], prompt_id=lease.prompt.id))
            taken = await asyncio.to_thread(trainer.take, step=1, num_groups=3, version=0, timeout_s=10)
            assert [group.prompt.id for group in taken.groups] == [0, 1, 2]

        run_async(work, made.address)
        assert made.service.buffer.accounts()["ledger/balance"] == 0
        trainer.close()


def test_after_a_rewind_the_window_counts_the_seats_that_it_counted_then(tmp_path: Path) -> None:
    """A group that is trained late keeps used-up seats behind it in line; without them others could be taken before it
    once more, and it would exceed the bound."""
    journal = open_journal(tmp_path, P=1, target_lag=3, max_lag=8)
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    buffer.sampler = lambda seat, step: -seat.position
    for lease in lease_all(buffer):
        buffer.insert(lease, make_parcel(lease, versions=[0]))
    lines = []
    for step in range(1, 5):
        assert buffer.take(step=step, num_groups=1, version=step - 1)
        lines.append([(seat.position, seat.used_up) for seat in buffer.line])
        journal.commit(buffer, Standing())
    assert lines[0] == [(0, False), (1, False), (2, False), (3, True)]
    assert lines[-1] == []
    journal.forget(1, buffer)
    again = journal.rewind(step=1)
    assert [(seat.position, seat.used_up) for seat in again.line] == lines[0]
    journal.close()
