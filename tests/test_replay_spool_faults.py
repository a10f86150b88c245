"""Groups in files when something goes wrong: disks that fill up, strangers' files, limits, processes that die at any
moment with segments that are written over all the time."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from replay_helpers import make_group, make_run, run_async, serving
from test_chaos_journal import small_disk

from asyncrl.config import SuperviseConfig
from asyncrl.replay import exchange, journal, server, spool, wire
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.messages import Lease
from asyncrl.types import Group

OWNER = "0123456789abcdef"
P = 3


def of_size(lease_id: int, size: int) -> Group:
    """A group that is packed into exactly so many bytes."""
    group = make_group(lease_id, versions=[0], prompt_id=lease_id)
    for _ in range(3):  # the length of the text is part of the header
        missing = size - sum(memoryview(f).nbytes for f in wire.pack_group(group))
        group.episodes[0].text += "x" * missing if missing > 0 else ""
        group.episodes[0].text = group.episodes[0].text[: missing if missing < 0 else None]
    assert sum(memoryview(f).nbytes for f in wire.pack_group(group)) == size
    return group


def test_groups_of_every_size_arrive_by_the_way_that_is_theirs(tmp_path: Path) -> None:
    sizes = [spool.LEAST_BYTES - 1, spool.LEAST_BYTES, spool.SEGMENT_BYTES, spool.SEGMENT_BYTES + 1, 1 << 20]
    in_files = [False, True, True, False, True]
    run = make_run(str(tmp_path), training={"batch_size": len(sizes) + 1, "steps": 2}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            for size, in_file in zip(sizes, in_files, strict=True):
                (lease,) = await client.lease(1)
                assert await client.insert(of_size(lease.id, size))
                (seat,) = [s for s in made.service.buffer.buffered.values() if s.lease_id == lease.id]
                assert (seat.parcel.place is not None) == in_file
            (lease,) = await client.lease(1)  # nothing but a long header
            empty = make_group(lease.id, versions=[0], length=0, prompt_id=lease.id)
            empty.episodes[0].metadata["long"] = "y" * spool.LEAST_BYTES
            empty.episodes[0].prompt_ids, empty.episodes[0].text = np.zeros(0, np.int32), ""
            assert await client.insert(empty)

        run_async(work, made.address)
        taken = trainer.take(step=1, num_groups=len(sizes) + 1, version=0, timeout_s=10).groups
        assert [sum(memoryview(f).nbytes for f in wire.pack_group(g)) for g in taken[:-1]] == sizes
        assert len(taken[-1].episodes[0].metadata["long"]) == spool.LEAST_BYTES
        trainer.close()


def test_a_segment_that_is_there_already_is_never_written_over_by_a_writer_that_starts(tmp_path: Path) -> None:
    writer, first = spool.Writer(tmp_path, OWNER), wire.pack_group(of_size(1, 1 << 17))
    place = writer.append(first)
    writer.close()
    again = spool.Writer(tmp_path, OWNER)
    with pytest.raises(FileExistsError):
        again.append(wire.pack_group(of_size(2, 1 << 17)))
    assert [bytes(f) for f in spool.gather(tmp_path, [place], ())] == [bytes(f) for f in first]
    again.close()


def test_an_insert_that_was_given_up_holds_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be on its way, and accepted after the answer that the segment is unused."""
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 300_000)  # two groups
    run = make_run(str(tmp_path), training={"batch_size": 9, "steps": 2}, target_lag=0)
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def work(client: AsyncReplayClient) -> None:
            await client.hello()
            leases = [lease for _ in range(4) for lease in await client.lease(1)]
            given_up = asyncio.create_task(client.insert(of_size(leases[0].id, 1 << 17)))
            await asyncio.sleep(0)
            given_up.cancel()
            for lease in leases[1:]:
                assert await client.insert(of_size(lease.id, 1 << 17))
            assert client._files is not None
            assert client._files._unanswered == {0: 1, 1: 0}
            client._files._ask = True
            assert client._files.ask() == []

        run_async(work, made.address)
        trainer.close()


def test_a_disk_that_takes_no_more_files_has_the_server_asked_for_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of inodes, or of quota: no group was written that would have failed."""
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 150_000)  # one group
    writer, create = spool.Writer(tmp_path, OWNER), spool._create
    for number in range(2):
        place = writer.append(wire.pack_group(of_size(number, 1 << 17)))
        assert place is not None
        writer.answered(place)
    assert writer.ask() == [0]
    writer.told([0], [])

    def no_new_ones(path: str, flags: int = 0) -> int:
        if flags & os.O_EXCL:
            raise OSError(122, "Disk quota exceeded")
        return create(path, flags)

    monkeypatch.setattr(spool, "_create", no_new_ones)
    with pytest.raises(OSError, match="quota"):
        writer.append(wire.pack_group(of_size(2, 1 << 17)))
    assert writer.ask() == [0]
    writer.told([0], [0])
    assert writer.append(wire.pack_group(of_size(3, 1 << 17))).segment == 0
    writer.close()


def test_a_folder_whose_server_was_killed_before_it_said_so_goes_and_one_that_is_being_made_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tempfile.mkdtemp(prefix="asyncrl-groups-")
    files, make, cleared = spool.Files(), tempfile.mkdtemp, list[str]()
    assert [str(p) for p in tmp_path.iterdir()] == [files.offer.folder]

    def clear_at_once(prefix: str) -> str:
        """Another server starts before the folder is locked, the first two times."""
        folder = make(prefix=prefix)
        if len(cleared) < 2:
            cleared.append(folder)
            spool._clear_temporary()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", clear_at_once)
    folder, claim = spool._make_temporary()
    assert len(cleared) == 2
    spool._clear_temporary()
    assert {str(p) for p in tmp_path.iterdir()} == {files.offer.folder, str(folder)}
    os.close(claim)
    spool._clear_temporary()
    assert [str(p) for p in tmp_path.iterdir()] == [files.offer.folder]
    files.close()


def test_what_others_put_into_the_folder_stays_and_ends_nothing(tmp_path: Path) -> None:
    files = spool.Files(tmp_path)
    strange = ["abc.tar", "f.1", f"{OWNER}.0~", f"{OWNER}.-1", f"{OWNER}.1.lock", "core.7", f"{'a' * 16}.٣"]
    for name in strange:
        (tmp_path / name).touch()
    (tmp_path / f"{'b' * 16}.3").mkdir()  # of nobody, and not to be deleted
    (tmp_path / f"{'c' * 16}.4").touch()
    files.sweep(set(), lambda owner: False)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*strange, f"{'b' * 16}.3", "token"])
    files.close()


def test_a_run_that_goes_on_without_files_reads_those_that_were_left_and_sweeps_them(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=2)

    async def work(client: AsyncReplayClient) -> None:
        await client.hello()
        for lease in await client.lease(3):
            assert await client.insert(of_size(lease.id, 1 << 17))

    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        run_async(work, made.address)
        trainer.close()
    assert len(list((tmp_path / "replay/left").glob("*.0"))) == 1
    run.config.replay.share_files = False
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        assert made.service.store.offer is None
        for step in (1, 2, 3):
            assert trainer.take(step=step, num_groups=1, version=0, timeout_s=10).groups[0].prompt.id == step - 1
        trainer.rewind(step=0, version=0)  # nothing refers to them any more
        trainer.close()
    with serving(run) as made:
        ReplayClient(made.address, role="status").hello()  # its first turn sweeps
    assert not list((tmp_path / "replay/left").glob("*.*"))


def test_a_disk_that_fills_up_in_the_middle_of_a_group_sends_it_through_the_socket(tmp_path: Path) -> None:
    """The folder is on a disk of its own: what does not fit there goes to the journal, and nothing is damaged."""
    run = make_run(str(tmp_path / "run"), training={"batch_size": 9, "steps": 2}, target_lag=0)
    (tmp_path / "run/replay").mkdir(parents=True)
    with small_disk(tmp_path / "run/replay/left", "600k"):
        os.chmod(tmp_path / "run/replay/left", 0o700)
        with serving(run) as made:
            trainer = ReplayClient(made.address, role="trainer")
            trainer.publish(version=0, step=0)

            async def work(client: AsyncReplayClient) -> None:
                await client.hello()
                while len(made.service.buffer.buffered) < 9:
                    for lease in await client.lease(1):
                        assert await client.insert(of_size(lease.id, 1 << 17))

            run_async(work, made.address)
            by_place = [s.parcel.place is not None for s in made.service.buffer.buffered.values()]
            assert by_place == [True] * 4 + [False] * 5
            taken = trainer.take(step=1, num_groups=9, version=0, timeout_s=10)
            assert [g.episodes[0].text for g in taken.groups] == [
                of_size(g.lease_id, 1 << 17).episodes[0].text for g in taken.groups
            ]
            trainer.close()


def small_files() -> None:
    """In every process: segments are written over after a few groups."""
    spool.SEGMENT_BYTES, spool.LEAST_BYTES, journal.PENDING_BYTES = 14_000, 0, 2048
    server.SWEEP_S = exchange.ASK_AGAIN_S = 0.2


def tokens_of(prompt_id: int) -> np.ndarray:
    return np.random.default_rng(prompt_id).integers(0, 1 << 30, 100 + prompt_id * 37 % 900).astype(np.int32)


def group_of(lease: Lease) -> Group:
    tokens = tokens_of(lease.prompt.id)
    group = make_group(lease.id, versions=[lease.version], length=len(tokens), prompt_id=lease.prompt.id)
    group.episodes[0].token_ids[:] = tokens
    return group


def _serve(run: object) -> None:
    small_files()
    server.serve(run, multiprocessing.Event())


def _generate(address: str, index: int, acked: str) -> None:
    """For ever; notes each prompt whose group was acknowledged."""
    small_files()

    async def main() -> None:
        client = AsyncReplayClient(address, index=index)
        await client.hello()
        assert client._files is not None
        while True:
            for lease in await client.lease(2):
                if await client.insert(group_of(lease)):
                    with open(acked, "ab", buffering=0) as file:
                        file.write(f"{lease.prompt.id}\n".encode())
                await client.heartbeat({})

    asyncio.run(main())


@pytest.mark.slow
def test_segments_are_written_over_all_the_time_while_processes_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer holds each answer back before it reads it, goes back to its checkpoint now and then, and trains
    every prompt once, as it was generated; what was acknowledged is trained or buffered in the end."""
    for module, name in ((spool, "SEGMENT_BYTES"), (spool, "LEAST_BYTES"), (journal, "PENDING_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(server, "SWEEP_S", server.SWEEP_S)
    monkeypatch.setattr(exchange, "ASK_AGAIN_S", exchange.ASK_AGAIN_S)
    small_files()
    run = make_run(str(tmp_path), training={"batch_size": P, "steps": 10_000}, target_lag=2)
    run.config.supervise, run.config.checkpoint.every = SuperviseConfig(dead_after_s=2.0), 2
    rng, spawn, acked = random.Random(0), multiprocessing.get_context("forkserver"), str(tmp_path / "acked")
    spawn.set_forkserver_preload(["asyncrl.replay.server", "replay_helpers"])
    start = {"server": lambda: spawn.Process(target=_serve, args=(run,), daemon=True)}
    processes = {"server": start["server"]()}
    processes["server"].start()
    address = server.read_address(tmp_path, timeout_s=30)
    for i in range(2):
        start[f"generator {i}"] = lambda i=i: spawn.Process(target=_generate, args=(address, i, acked), daemon=True)
        processes[f"generator {i}"] = start[f"generator {i}"]()
        processes[f"generator {i}"].start()

    trained: dict[int, list[int]] = {}
    saved, names, trainer = 0, set[str](), ReplayClient(address, role="trainer")
    trainer.publish(version=0, step=0)
    while saved < 120:
        step = max(trained, default=0) + 1
        asked = trainer.ask(step=step, num_groups=P, version=step - 1, timeout_s=60)
        if rng.random() < 0.2:
            trainer._socket.poll(10_000)
            time.sleep(0.1)  # a slow reader: the answer is there, and the generators go on
        if step > 3 and rng.random() < 0.07:
            who = rng.choice(["server", *start])
            processes[who].kill()
            processes[who].join(10)
            processes[who] = start[who]()
            processes[who].start()
        taken = trainer.receive(asked).unpack()
        assert taken.metrics["ledger/balance"] == taken.metrics["ledger_tokens/balance"] == 0
        for group in taken.groups:
            assert np.array_equal(group.episodes[0].token_ids, tokens_of(group.prompt.id))
            assert group.prompt.id not in {p for prompts in trained.values() for p in prompts}
        trained[step] = [group.prompt.id for group in taken.groups]
        trainer.publish(version=step, step=step)
        if step % 2 == 0:
            saved = step
            trainer.forget(step=saved)
        elif saved and rng.random() < 0.05:
            trainer.close()
            trainer = ReplayClient(address, role="trainer")
            trainer.rewind(step=saved, version=saved)
            trainer.publish(version=saved, step=saved)
            trained = {s: prompts for s, prompts in trained.items() if s <= saved}
        names |= {p.name for p in (tmp_path / "replay/left").glob("*.*[0-9]")}
    trainer.close()
    for process in processes.values():
        process.kill()
        process.join(10)
    done = Path(acked).read_text().split()
    written = sum(13 * len(tokens_of(int(prompt))) for prompt in done)
    assert len(names) * spool.SEGMENT_BYTES < written  # so some were written over
    again = server.open_server(run, bind="tcp://127.0.0.1:*")
    prompts = {p for prompts in trained.values() for p in prompts}
    buffered = {seat.prompt.id for seat in again.service.buffer.buffered.values()}
    assert set(map(int, done)) <= prompts | buffered
    assert Counter(len(p) for p in trained.values()) == {P: len(trained)}
    assert again.service.buffer.accounts()["ledger/balance"] == 0
    again.close()
