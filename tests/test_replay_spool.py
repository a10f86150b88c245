"""Groups in files: what is read is what was written, nothing is lost or written over too early, files go in the end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from replay_helpers import make_group, make_parcel, make_run, run_async, serving

from asyncrl.replay import server, spool, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.messages import Insert, Offer, Place
from asyncrl.replay.seal import Payload
from asyncrl.replay.store import Store
from asyncrl.types import Group

OWNER, OTHER = "0123456789abcdef", "fedcba9876543210"
LENGTH = 10_000
"""Tokens: 130 KB."""


def numbered(lease_id: int, version: int = 0) -> Group:
    """A group that cannot be taken for another one."""
    group = make_group(lease_id, versions=[version], length=LENGTH, prompt_id=lease_id)
    group.episodes[0].token_ids[:] = marks(lease_id)
    return group


def marks(lease_id: int) -> np.ndarray:
    """Token ids that no group of a lease near it has."""
    return np.arange(LENGTH, dtype=np.int32) + lease_id % 1_000_000


def left(writer: spool.Writer, lease_id: int) -> Place:
    place = writer.append(wire.pack_group(numbered(lease_id)))
    assert place is not None
    return place


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_group_is_read_as_it_was_written_and_small_or_huge_ones_use_the_socket(tmp_path: Path) -> None:
    writer, packed = spool.Writer(tmp_path, OWNER), [wire.pack_group(numbered(i)) for i in range(3)]
    places = [writer.append(p) for p in packed]
    for place, whole in zip(places, packed, strict=True):
        assert [bytes(f) for f in spool.gather(tmp_path, [place], ())] == [bytes(f) for f in whole]
    mixed = spool.gather(tmp_path, [None, places[1]], packed[0])
    assert [bytes(f) for f in mixed] == [bytes(f) for f in packed[0] + packed[1]]
    assert writer.append([b"h", bytes(spool.LEAST_BYTES - 2)]) is None
    assert writer.append([b"h", bytes(spool.SEGMENT_BYTES)]) is None
    writer.close()


def _elsewhere(folder: Path, place: Place) -> Place:
    os.replace(folder / f"{OWNER}.0", folder.parent / "secret")
    return msgspec.structs.replace(place, owner="../secret")


def _link(folder: Path, place: Place) -> Place:
    os.replace(folder / f"{OWNER}.0", folder.parent / "secret")
    os.symlink(folder.parent / "secret", folder / f"{OWNER}.0")
    return place


def _fifo(folder: Path, place: Place) -> Place:
    os.unlink(folder / f"{OWNER}.0")
    os.mkfifo(folder / f"{OWNER}.0")
    return place


def _cut(folder: Path, place: Place) -> Place:
    os.truncate(folder / f"{OWNER}.0", place.length - 1)
    return place


def _changed(**changes: object) -> Callable[[Path, Place], Place]:
    return lambda folder, place: msgspec.structs.replace(place, **changes)


HOSTILE = {
    "a path": _elsewhere,
    "a link": _link,
    "a pipe": _fifo,
    "a file that was cut": _cut,
    "somebody else's": _changed(owner=OTHER),
    "the journal's": _changed(owner=""),
    "another segment": _changed(segment=1),
    "far behind the end": _changed(offset=1 << 53),
    "partly behind the end": _changed(offset=5),
    "too long": _changed(length=1 << 53),
    "a header longer than the whole": _changed(header=1 << 40),
    "another header": _changed(header=1),
    "no digests": _changed(digests=[]),
    "other digests": _changed(digests=[bytes(16), bytes(16)]),
    "negative numbers": _changed(offset=-1, segment=-1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_places_are_refused(what: str, tmp_path: Path) -> None:
    files = spool.Files(tmp_path / "groups")
    writer, store = spool.Writer(tmp_path / "groups", OWNER), Store(files=files)
    other = spool.Writer(tmp_path / "groups", OTHER)
    place = left(writer, 7)
    left(other, 7)
    bad = HOSTILE[what](tmp_path / "groups", place)
    with pytest.raises(ValueError):  # noqa: PT011  each has its own words
        store.parcel(OWNER, Insert(lease_id=7, place=bad), Payload((), ()))
    files.close()


def test_the_group_of_another_lease_is_refused_and_numbers_below_zero_do_not_leave_the_decoder(tmp_path: Path) -> None:
    files = spool.Files(tmp_path)
    writer, store = spool.Writer(tmp_path, OWNER), Store(files=files)
    place = left(writer, 7)
    assert store.parcel(OWNER, Insert(lease_id=7, place=place), Payload((), ())).place == place
    with pytest.raises(ValueError, match="is of lease 7, the request of lease 8"):
        store.parcel(OWNER, Insert(lease_id=8, place=place), Payload((), ()))
    body = Insert(lease_id=7, place=msgspec.structs.replace(place, offset=-1))
    with pytest.raises(ValueError, match=">= 0"):
        wire.unpack_request(wire._pack_header(wire.Envelope(OWNER, 0, 0, "generator", 0, body)))
    with pytest.raises(ValueError, match="in the folder that this server has offered"):
        Store().parcel(OWNER, Insert(lease_id=7, place=place), Payload((), ()))
    files.close()


def test_only_the_same_private_folder_on_the_same_machine_is_accepted(tmp_path: Path) -> None:
    files = spool.Files(tmp_path / "groups")
    offer = files.offer
    assert spool.accept(offer) == tmp_path / "groups"
    wrong: list[Offer | None] = [None]
    changes = ({"boot": "another"}, {"boot": ""}, {"token": "another"}, {"folder": str(tmp_path / "missing")})
    wrong += [msgspec.structs.replace(offer, **change) for change in changes]
    assert [spool.accept(o) for o in wrong] == [None] * 5
    (tmp_path / "groups").chmod(0o755)
    assert spool.accept(offer) is None
    files.close()


def test_a_segment_is_asked_about_once_at_a_time_and_not_before_all_its_groups_are_answered_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 300_000)  # two groups
    writer = spool.Writer(tmp_path, OWNER)
    places = [left(writer, i) for i in range(4)]
    assert [p.segment for p in places] == [0, 0, 1, 1]
    writer.answered(places[0])
    assert writer.ask() == []
    writer.answered(places[1])
    places += [left(writer, 4)]
    assert (writer.ask(), writer.ask()) == ([0], [])
    writer.answered(places[2])
    writer.answered(places[3])
    places += [left(writer, i) for i in (5, 6)]
    assert writer.ask() == [1]  # not 0 again: its first answer is still to come
    writer.told([0], [])
    writer.told([1], [1])
    places += [left(writer, i) for i in (7, 8)]
    assert places[-1].segment == 1  # written over
    assert writer.ask() == [0]
    writer.close()


def test_what_the_dead_have_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    files = spool.Files(tmp_path)
    alive, silent, dead = "a" * 16, "b" * 16, "c" * 16
    for owner in (alive, dead):
        writer = spool.Writer(tmp_path, owner)
        left(writer, 0)
        writer.close()
    holds = spool.Writer(tmp_path, silent)
    left(holds, 0)
    names = lambda: sorted(p.name[0] + p.suffix for p in tmp_path.glob("*.*"))  # noqa: E731
    before = names()
    assert before == ["a.0", "a.lock", "b.0", "b.lock", "c.0", "c.lock"]
    files.sweep({(dead, 0)}, lambda owner: owner == alive)
    assert names() == before
    files.sweep(set(), lambda owner: owner == alive)
    assert names() == before[:4]
    holds.close()
    files.sweep(set(), lambda owner: False)
    assert names() == []
    files.close()


def _open_and_hang(folder: str, ready: object) -> None:
    tempfile.tempdir = folder
    files = spool.Files()
    ready.set()  # type: ignore[attr-defined]
    signal.pause()
    files.close()


def test_a_temporary_folder_goes_with_its_server_or_with_the_next_one(temporary: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=_open_and_hang, args=(str(temporary), ready))
    process.start()
    assert ready.wait(30)
    spool.Files().close()
    assert len(list(temporary.iterdir())) == 1  # it is still there
    process.kill()
    process.join(10)
    files = spool.Files()
    assert [str(p) for p in temporary.iterdir()] == [files.offer.folder]
    files.close()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("journal", "share"), [(True, True), (False, True), (True, False)])
def test_groups_arrive_whole_the_ledger_closes_and_the_disk_stays_bounded(
    journal: bool, share: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 groups in segments of two; the trainer keeps what it took."""
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 300_000)
    monkeypatch.setattr("asyncrl.replay.journal.PENDING_BYTES", 4096)  # else it forgets only after all of them
    steps, P = 50, 4
    run = make_run(
        str(tmp_path), training={"batch_size": P, "steps": steps}, target_lag=1, journal=journal, share_files=share
    )
    with serving(run) as made:
        offer = made.service.store.offer
        assert (offer is not None) == share
        trainer, most, kept = ReplayClient(made.address, role="trainer"), 0, []
        trainer.publish(version=0, step=0)

        async def generate(client: AsyncReplayClient) -> None:
            await client.hello()
            while leases := await client.lease(3):
                done = await asyncio.gather(*(client.insert(numbered(x.id, x.version)) for x in leases))
                assert all(done)

        async def both(client: AsyncReplayClient) -> None:
            nonlocal most
            generating = asyncio.create_task(generate(client))
            for step in range(1, steps + 1):
                taken = await asyncio.to_thread(trainer.take, step=step, num_groups=P, version=step - 1, timeout_s=20)
                kept.extend(taken.groups)
                assert taken.metrics["ledger/balance"] == 0
                await asyncio.to_thread(trainer.publish, version=step, step=step)
                await asyncio.to_thread(trainer.forget, step=step - 1)
                if offer is not None:
                    most = max(most, len(list(Path(offer.folder).glob("*.*"))))
            await asyncio.to_thread(trainer.finish, "enough")
            await generating

        run_async(both, made.address)
        assert [g.prompt.id for g in kept] == [g.lease_id for g in kept]
        assert [g.lease_id - kept[0].lease_id for g in kept] == list(range(steps * P))
        for group in kept:
            assert np.array_equal(group.episodes[0].token_ids, marks(group.lease_id))
        assert made.service.buffer.accounts()["ledger/balance"] == 0
        assert (most > 1) == share
        assert most < 25
        trainer.close()


def test_a_folder_that_goes_away_means_the_socket(tmp_path: Path, temporary: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=0, journal=False)
    with serving(run) as made:
        assert made.service.store.files is not None
        folder = Path(made.service.store.files.offer.folder)
        trainer = ReplayClient(made.address, role="trainer")

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            for step in range(1, 5):
                await asyncio.to_thread(trainer.publish, version=step - 1, step=step - 1)
                (lease,) = await client.lease(1)
                if step == 2:
                    trainer._folder = tmp_path  # where nothing lies
                if step == 3:
                    shutil.rmtree(folder)
                    made.service.store.files.release(client._session.incarnation)  # a file that is open stays
                assert await client.insert(numbered(lease.id, lease.version))
                assert (client._files is not None) == (step < 3)
                taken = await asyncio.to_thread(trainer.take, step=step, num_groups=1, version=step - 1, timeout_s=10)
                assert taken.groups[0].episodes[0].token_ids[0] == marks(lease.id)[0]
                assert (trainer._folder is not None) == (step < 2)

        run_async(work, made.address)
        assert made.service.buffer.accounts()["ledger/balance"] == 0
        trainer.close()


def test_a_remembered_batch_keeps_its_files(tmp_path: Path) -> None:
    """A reply that may be asked for again refers to files that nothing else refers to."""
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=0, journal=False)
    with serving(run) as made:
        trainer, service = ReplayClient(made.address, role="trainer"), made.service
        trainer.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> str:
            await client.hello()
            (lease,) = await client.lease(1)
            assert await client.insert(numbered(lease.id))
            return client._session.incarnation

        owner = str(run_async(work, made.address))
        trainer.take(step=1, num_groups=1, version=0, timeout_s=10)
        trainer.hello()  # so the reply to the batch is no longer wanted
        service.buffer.recent.clear()
        assert service.store.unused(owner, [0], service.buffer, service.peers) == [0]
        peer = next(p for p in service.peers.known.values() if p.role == "trainer")
        place = Place(0, 0, 1, owner)
        parcel = msgspec.structs.replace(make_parcel(0, versions=[0]), place=place)
        peer.remember(10**6, [b""], [parcel])
        assert service.store.unused(owner, [0, 1], service.buffer, service.peers) == [1]
        peer.acknowledge(10**6 + 1)
        assert service.store.unused(owner, [0, 1], service.buffer, service.peers) == [0, 1]
        trainer.close()


def _generate(address: str, acked: object) -> None:
    """Reports each acknowledged prompt, for ever."""

    async def main() -> None:
        client = AsyncReplayClient(address)
        await client.hello()
        assert client._files is not None
        while True:
            for lease in await client.lease(4):
                if await client.insert(numbered(lease.id, lease.version)):
                    acked.put(lease.prompt.id)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_acknowledged_groups_survive_the_kill_of_generator_and_server(tmp_path: Path) -> None:
    """Two generators, then the server: what was acknowledged is found again, though their files are swept."""
    run = make_run(
        str(tmp_path), training={"batch_size": 1, "steps": 500}, target_lag=300, order="fifo", lease_timeout_s=3600
    )
    spawn = multiprocessing.get_context("spawn")
    stop, seen = spawn.Event(), set[int]()
    process = spawn.Process(target=server.serve, args=(run, stop))
    process.start()
    address = server.read_address(tmp_path, timeout_s=30)
    trainer = ReplayClient(address, role="trainer")
    trainer.publish(version=0, step=0)
    for _ in range(2):
        acked = spawn.SimpleQueue()
        generator = spawn.Process(target=_generate, args=(address, acked), daemon=True)
        generator.start()
        enough = len(seen) + 40
        while len(seen) < enough:
            seen.add(acked.get())
        generator.kill()
        generator.join(10)
        while not acked.empty():
            seen.add(acked.get())
    process.kill()
    process.join(10)
    trainer.close()
    with serving(run) as made:  # sweeps in its first turn
        buffer = made.service.buffer
        assert seen <= {s.prompt.id for s in buffer.buffered.values()}
        assert buffer.accounts()["ledger/balance"] == 0
        trainer = ReplayClient(made.address, role="trainer")
        for step in range(1, 31):
            (group,) = trainer.take(step=step, num_groups=1, version=0, timeout_s=10).groups
            assert np.array_equal(group.episodes[0].token_ids, marks(group.lease_id))
        trainer.close()
