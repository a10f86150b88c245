"""What a kill, a full disk or a second process leaves half done: nothing is lost, taken for another, or waited for."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import zmq
from replay_helpers import make_group, make_run, run_async, serving
from test_chaos_journal import small_disk
from test_replay_rewind import Wire, packed
from test_replay_spool import numbered

from asyncrl.replay import database, frames, journal, messages, redo, server, spool, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import Session
from asyncrl.replay.seal import unseal


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def crash(made: server.Server) -> None:
    """Leave its files as SIGKILL leaves them."""
    made._journal._db.close()
    made._journal._redo.close()
    made._journal._segments.close()
    made.service.store.close()
    made._context.destroy(linger=0)


def test_a_second_server_on_a_run_folder_is_refused_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would write over each other's records, and what both had acknowledged would be lost."""
    monkeypatch.setattr(redo, "HELD_S", 0.1)
    run = make_run(str(tmp_path), training={"batch_size": 4, "steps": 9}, target_lag=1)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    with pytest.raises(ValueError, match="another replay server uses"):
        server.open_server(run, bind="tcp://127.0.0.1:*")
    crash(made)
    server.open_server(run, bind="tcp://127.0.0.1:*").close()


def test_a_damaged_segment_of_the_journal_is_named_with_what_to_do(tmp_path: Path, context: zmq.Context) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 2, "steps": 9}, target_lag=1)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    trainer, generator = Wire(context, made, "trainer"), Wire(context, made, "generator")
    trainer.ask(messages.Publish(version=0, step=0))
    (lease,) = generator.ask(messages.AskLease(n=1)).leases
    assert generator.ask(messages.Insert(lease_id=lease.id), packed(lease)).accepted
    made.close()
    (segment,) = (tmp_path / "replay" / "groups").glob("*.bin")
    segment.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"cannot be read: segment 0 is damaged.* replay.journal false"):
        server.open_server(run, bind="tcp://127.0.0.1:*")


def test_a_kill_in_the_turn_of_a_start_afresh_gives_no_lease_a_number_for_the_second_time(
    tmp_path: Path, context: zmq.Context
) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 3, "steps": 9}, target_lag=0)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    generator, trainer = Wire(context, made, "generator"), Wire(context, made, "trainer")
    trainer.ask(messages.Publish(version=0, step=0))
    (first,) = generator.ask(messages.AskLease(n=1)).leases
    generator.ask(messages.Drop(lease_id=first.id, reason="aborted"))
    (former,) = generator.ask(messages.AskLease(n=1)).leases
    assert (former.id, former.prompt.id) == (1, 0)
    made._journal.rewind(step=0)
    crash(made)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    trainer, again = Wire(context, made, "trainer"), Wire(context, made, "generator")
    again.session = generator.session  # it lives on, with its lease
    trainer.ask(messages.Rewind(step=0, version=0))
    trainer.ask(messages.Publish(version=0, step=0))
    leases = again.ask(messages.AskLease(n=3)).leases
    assert [lease.prompt.id for lease in leases] == [0, 1, 2]
    assert former.id not in {lease.id for lease in leases}
    assert again.ask(messages.Insert(lease_id=former.id), packed(former)) == messages.Done(accepted=False)
    made.close()


def test_a_turn_that_fits_on_the_disk_only_when_it_is_written_again_keeps_its_prompts(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once before a rewind and once at the turn's end."""
    run = make_run(str(tmp_path), training={"batch_size": 3, "steps": 9}, target_lag=3)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    generator, trainer = Wire(context, made, "generator"), Wire(context, made, "trainer")
    trainer.ask(messages.Publish(version=0, step=0))
    append, failed = made._journal._redo.append, list[int]()

    def fill_up(epoch: int, record: bytes) -> None:
        if not failed:
            failed.append(epoch)
            raise OSError(28, "No space left on device")
        append(epoch, record)

    monkeypatch.setattr(made._journal._redo, "append", fill_up)
    generator.send(messages.AskLease(n=2))
    made.service.handle(b"", made._socket.recv_multipart()[1:], 0.0)
    with pytest.raises(database.JournalFull):
        trainer.ask(messages.Rewind(step=0, version=0))
    crash(made)
    again = server.open_server(run, bind="tcp://127.0.0.1:*")
    assert [seat.prompt.id for seat in again.service.buffer.leased.values()] == [0, 1]
    assert again.service.buffer.accounts()["ledger/balance"] == 0
    again.close()


def test_a_trainer_is_told_when_a_file_with_its_batch_is_gone(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=0)

    async def work(client: AsyncReplayClient) -> None:
        await client.hello()
        (lease,) = await client.lease(1)
        assert await client.insert(numbered(lease.id))

    def take_what_is_gone() -> None:
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)
            run_async(work, made.address)
            shutil.rmtree(tmp_path / "replay/left")
            made.service.store.files._reader.close()
            with pytest.raises(RuntimeError, match="a group that was accepted is gone from"):
                trainer.take(step=1, num_groups=1, version=0, timeout_s=10)
            trainer.close()

    with pytest.raises(RuntimeError, match="a group that was accepted is gone from"):
        take_what_is_gone()


def test_on_a_full_disk_a_generator_goes_on_in_the_files_that_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 300_000)  # two groups
    monkeypatch.setattr(journal, "PENDING_BYTES", 2048)
    steps, by_place = 40, list[bool]()
    run = make_run(str(tmp_path / "run"), training={"batch_size": 1, "steps": steps}, target_lag=4)
    (tmp_path / "run/replay").mkdir(parents=True)
    with small_disk(tmp_path / "run/replay/left", "1400k"):  # ten groups
        os.chmod(tmp_path / "run/replay/left", 0o700)
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)

            async def work(client: AsyncReplayClient) -> None:
                await client.hello()
                for step in range(1, steps + 1):
                    while room := made.service.buffer.room():
                        for lease in await client.lease(room):
                            assert await client.insert(numbered(lease.id, lease.version))
                            (seat,) = [s for s in made.service.buffer.buffered.values() if s.lease_id == lease.id]
                            by_place.append(seat.parcel.place is not None)
                    taken = await asyncio.to_thread(
                        trainer.take, step=step, num_groups=1, version=step - 1, timeout_s=10
                    )
                    assert taken.groups[0].episodes[0].token_ids[0] == taken.groups[0].lease_id
                    await asyncio.to_thread(trainer.publish, version=step, step=step)
                    if step >= 10:
                        await asyncio.to_thread(trainer.forget, step=step - 1)

            run_async(work, made.address)
            trainer.close()
    assert not all(by_place)
    assert sum(by_place[20:]) >= 10


def test_a_former_trainer_that_wakes_up_is_told_to_end(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=1)
    with serving(run) as made:
        former, trainer, other = (ReplayClient(made.address, role="trainer") for _ in range(3))
        former._session.incarnation = "0123456789abcdef"  # of another process
        former.rewind(step=0, version=0)
        former.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            for lease in await client.lease(2):
                assert await client.insert(make_group(lease.id, versions=[0], prompt_id=lease.prompt.id))

        run_async(work, made.address)
        former.take(step=1, num_groups=1, version=0, timeout_s=10)
        other.status()  # the prefetching connection of the new trainer's process
        trainer.rewind(step=1, version=1)
        trainer.publish(version=1, step=1)
        for request in (
            lambda: former.take(step=2, num_groups=1, version=1, timeout_s=10),
            lambda: former.publish(version=2, step=1),
            lambda: former.finish("done"),
        ):
            with pytest.raises(ValueError, match="another trainer has started from a checkpoint"):
                request()
        assert other.take(step=2, num_groups=1, version=1, timeout_s=10).groups[0].prompt.id == 1
        for client in (former, trainer, other):
            client.close()


def test_a_former_trainer_is_refused_by_a_server_that_was_killed_since(tmp_path: Path, context: zmq.Context) -> None:
    """It wakes up and speaks first, also to a server that had never heard of it when the next trainer started."""
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=1)
    sessions: dict[str, Session] = {}
    made = server.open_server(run, bind="tcp://127.0.0.1:*")

    def wire_of(name: str) -> Wire:
        client = Wire(context, made, "trainer")
        client.session = sessions.setdefault(name, client.session)
        return client

    def restart() -> server.Server:
        crash(made)
        return server.open_server(run, bind="tcp://127.0.0.1:*")

    for name in ("first", "second", "third"):
        trainer = wire_of(name)
        trainer.session.incarnation = f"{name:_<16}"
        trainer.ask(messages.Hello(pid=1))
        assert trainer.ask(messages.Rewind(step=0, version=0)) == messages.Done()
        trainer.ask(messages.Publish(version=0, step=0))
        if name == "third":
            made._journal.rewind(step=0)  # as far as it came with another start afresh when it was killed
        made = restart()
    for name in ("first", "second"):
        former = wire_of(name)
        for body in (
            messages.Publish(version=0, step=0),
            messages.Take(step=1, num_groups=1, version=0),
            messages.Rewind(step=0, version=0),
            messages.Finish(reason="done"),
        ):
            refused = former.ask(body)
            assert isinstance(refused, messages.Refused)
            assert "another trainer has started from a checkpoint" in refused.message
    trainer = wire_of("third")
    assert trainer.ask(messages.Rewind(step=0, version=0)) == messages.Done()
    assert trainer.ask(messages.Publish(version=0, step=0)) == messages.Done()
    other = Wire(context, made, "trainer")
    other.session.incarnation = trainer.session.incarnation[:8] + "prefetch"
    assert isinstance(other.ask(messages.Status()), messages.Report)
    assert other.ask(messages.Finish(reason="done")) == messages.Done()
    made.close()


@pytest.mark.parametrize("journal", [True, False])
def test_trainers_that_were_silent_for_long_are_still_the_present_and_the_former_one(
    tmp_path: Path, context: zmq.Context, journal: bool
) -> None:
    """A step may take longer than the server remembers who is silent."""
    made = server.open_server(make_run(str(tmp_path), journal=journal), bind="tcp://127.0.0.1:*")
    former, trainer = Wire(context, made, "trainer"), Wire(context, made, "trainer")
    former.session.incarnation = "0123456789abcdef"
    for client in (former, trainer):
        client.ask(messages.Hello(pid=1))
        assert client.ask(messages.Rewind(step=0, version=0)) == messages.Done()
    made.service.tick(10_000.0)
    assert not made.service.peers.known
    assert isinstance(former.ask(messages.Publish(version=0, step=0)), messages.Refused)
    assert trainer.ask(messages.Publish(version=0, step=0)) == messages.Done()
    made.close()


def test_a_rewind_that_is_refused_takes_nothing_over(tmp_path: Path, context: zmq.Context) -> None:
    made = server.open_server(make_run(str(tmp_path)), bind="tcp://127.0.0.1:*")
    trainer, other = Wire(context, made, "trainer"), Wire(context, made, "trainer")
    other.session.incarnation = "0123456789abcdef"
    assert trainer.ask(messages.Rewind(step=0, version=0)) == messages.Done()
    assert isinstance(other.ask(messages.Rewind(step=7, version=7)), messages.Refused)
    assert trainer.ask(messages.Publish(version=0, step=0)) == messages.Done()
    made.close()


def test_without_a_journal_a_trainer_from_before_the_server_is_told_to_resume(
    tmp_path: Path, context: zmq.Context
) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, journal=False)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    trainer = Wire(context, made, "trainer")
    trainer.ask(messages.Hello(pid=1))
    trainer.ask(messages.Rewind(step=0, version=0))
    assert trainer.ask(messages.Publish(version=0, step=0)) == messages.Done()
    made.close()
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    again = Wire(context, made, "trainer")
    again.session = trainer.session
    refused = again.ask(messages.Publish(version=0, step=0))
    assert isinstance(refused, messages.Refused)
    assert "has no journal, so what the run had is lost: resume it" in refused.message
    made.close()


def _take_slowly(address: str, began: Event, go_on: Event) -> None:
    """A trainer that is held up behind the first frame of its batch."""
    trainer = ReplayClient(address, role="trainer")
    trainer.hello()
    receive = frames._recv

    def held_up(socket: zmq.Socket, flags: int, copy: bool) -> zmq.Frame:
        frame = receive(socket, flags, copy)
        began.set()
        go_on.wait(20)
        time.sleep(0.2)  # until libzmq's own thread has seen the end of the connection
        frames._recv = receive
        return frame

    frames._recv = held_up
    groups = trainer.take(step=1, num_groups=200, version=0, timeout_s=20).groups
    assert [group.prompt.id for group in groups] == list(range(200))


def test_a_server_that_ends_while_its_batch_is_being_read_does_not_end_the_trainer(tmp_path: Path) -> None:
    """libzmq would abort it between two frames of one message."""
    run = make_run(str(tmp_path), training={"batch_size": 200, "steps": 9}, target_lag=0)
    spawn = multiprocessing.get_context("spawn")
    began, go_on = spawn.Event(), spawn.Event()
    with serving(run) as made:
        publisher = ReplayClient(made.address, role="trainer")
        publisher.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            for lease in await client.lease(200):
                assert await client.insert(make_group(lease.id, versions=[0], prompt_id=lease.prompt.id))

        run_async(work, made.address)
        publisher.close()
        trainer = spawn.Process(target=_take_slowly, args=(made.address, began, go_on))
        trainer.start()
        assert began.wait(30)
    go_on.set()
    trainer.join(30)
    assert trainer.exitcode == 0


def test_leases_that_a_killed_server_has_granted_and_not_sent_are_those_that_are_asked_for_again(
    tmp_path: Path, context: zmq.Context
) -> None:
    """Nobody would work on them, and without room for others the run would stand still until they expire."""
    run = make_run(str(tmp_path), training={"batch_size": 2, "steps": 9}, target_lag=0)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    generator, trainer = Wire(context, made, "generator"), Wire(context, made, "trainer")
    trainer.ask(messages.Publish(version=0, step=0))
    request = generator.session.pack(generator.session.begin(), messages.AskLease(n=2))
    made.service.handle(b"", request, 0.0)
    made._commit()
    granted = sorted(made.service.buffer.leased)
    assert granted == [0, 1]
    crash(made)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    made.service.handle(b"", request, 0.0)
    ((_, reply),) = made.service.outbox
    assert [lease.id for lease in wire.unpack_reply(unseal(reply)[0]).body.leases] == granted
    assert made.service.buffer.accounts()["ledger/started"] == 2
    made.close()
