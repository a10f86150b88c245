"""The journal: what is acknowledged survives, and a resumed trainer finds the state of its checkpoint."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import limits_of, make_buffer, make_group, make_parcel, make_run

from asyncrl.config import CurriculumConfig
from asyncrl.curriculum import Curriculum
from asyncrl.replay import server
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.database import JournalFull
from asyncrl.replay.journal import Journal
from asyncrl.replay.limiter import least_max_lag
from asyncrl.replay.segments import Segments
from asyncrl.replay.standing import Standing
from asyncrl.types import Prompt


def open_journal(folder: Path, **limits: object) -> Journal:
    def blank(cursor: int) -> Buffer:
        buffer = make_buffer(live=False, **limits)  # type: ignore[arg-type]
        for _ in range(cursor):
            next(buffer.prompts)
        buffer.cursor = cursor
        return buffer

    return Journal(folder, blank)


def view(buffer: Buffer) -> dict:
    """Everything about a buffer that decides what it does next."""
    seats = [
        (s.position, s.prompt, s.attempt, s.lease_id, s.owner, s.version, s.uses, s.used_up, s.last_step)
        + ((s.parcel.num_tokens, s.parcel.oldest_version) if s.parcel else ())
        for s in buffer.line
    ]
    same = ("cursor", "next_lease", "step", "made_uses", "partial_uses", "live_version", "live_uses", "bytes_buffered")
    return {
        "seats": seats,
        "recent": {k: [p.lease_id for p in v] for k, v in buffer.recent.items()},
        "waiting": sorted(buffer.waiting),
        "places": (sorted(buffer.leased), sorted(buffer.buffered), buffer.committed, buffer.room()),
        "accounts": buffer.accounts(),
        **{name: getattr(buffer, name) for name in same},
    }


def act(buffer: Buffer, rng: random.Random) -> None:
    """One random thing happens."""
    what = rng.choice(["lease", "insert", "insert", "insert", "drop", "die", "take", "take", "publish"])
    leased = list(buffer.leased.values())
    if what == "lease":
        buffer.lease(rng.randint(1, 3), owner=rng.choice("ab"), request=0, now=0.0)
    elif what == "insert" and leased:
        seat = rng.choice(leased)
        buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version] * 2, length=rng.randint(1, 9)))
    elif what == "drop" and leased and rng.random() < 0.3:
        buffer.drop(rng.choice(leased).lease_id, "filtered", num_tokens=2)
    elif what == "die" and rng.random() < 0.2:
        buffer.release(rng.choice("ab"))
    elif what == "take":
        buffer.take(step=buffer.step + 1, num_groups=buffer.limits.batch_size, version=buffer.step)
    elif what == "publish" and buffer.step > buffer.live_version:
        buffer.publish(version=buffer.step, step=buffer.step)


@pytest.mark.parametrize(("found", "named"), [(1, "1"), (2, "2"), (4, "4"), (None, "unknown")])
def test_a_journal_of_another_asyncrl_is_refused_and_named(tmp_path: Path, found: int | None, named: str) -> None:
    """Its digests would make whole groups look damaged; before its first transaction it has records alone."""
    journal = open_journal(tmp_path)
    buffer, standing = journal.restore()
    buffer.publish(version=0, step=0)
    journal.commit(buffer, standing)
    records = (tmp_path / "redo.bin").read_bytes()
    journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("update meta set format = ?" if found else "delete from meta where ? is null", (found,))
        db.execute(f"pragma user_version = {found if found and found > 3 else 0}")
        db.commit()
    if found is None:
        (tmp_path / "redo.bin").write_bytes(records)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"journal format {named}, this asyncrl writes 3: resume with the asyncrl"):
            open_journal(tmp_path)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), P=st.integers(1, 3), S=st.integers(0, 2), reuse=st.integers(1, 2))
def test_restored_buffer_is_the_one_that_was_committed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, P: int, S: int, reuse: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("journal"), random.Random(seed)
    shape = {"P": P, "target_lag": max(S, reuse - 1), "reuse": reuse}
    journal = open_journal(folder, **shape)
    standing = Standing(announced={"weights": ("here", "trainer")}, trainers=["former", "trainer"])
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    for _ in range(rng.randint(1, 60)):
        act(buffer, rng)
        if rng.random() < 0.5:
            journal.commit(buffer, standing)
        if rng.random() < 0.05:
            journal.forget(max(0, buffer.step - 4), buffer)
    journal.commit(buffer, standing)
    before = view(buffer)
    act(buffer, rng)  # not committed: it never happened
    journal.close()
    again, found = open_journal(folder, **shape).restore()
    assert view(again) == before
    assert found == standing


def test_what_waits_for_its_transaction_is_restored_and_a_torn_record_never_happened(tmp_path: Path) -> None:
    """The files as a kill leaves them: between two transactions, then in the middle of a write, then after one."""
    rng = random.Random(1)
    journal = open_journal(tmp_path / "run", P=2, target_lag=2)
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    before = []
    for _ in range(30):
        act(buffer, rng)
        before.append(view(buffer))
        journal.commit(buffer, Standing())
    assert (tmp_path / "run" / "redo.bin").stat().st_size > 1000

    def restored(name: str, cut: int = 0) -> dict:
        copy = shutil.copytree(tmp_path / "run", tmp_path / name)
        size = (copy / "redo.bin").stat().st_size
        os.truncate(copy / "redo.bin", max(0, size - cut))
        found = open_journal(copy, P=2, target_lag=2)
        seen = view(found.restore()[0])
        found.close()
        assert (copy / "redo.bin").stat().st_size == 0
        return seen

    assert restored("killed") == before[-1]
    assert restored("torn", cut=1) == next(b for b in reversed(before) if b != before[-1])
    records = (tmp_path / "run" / "redo.bin").read_bytes()
    journal.flush()
    (tmp_path / "run" / "redo.bin").write_bytes(records)  # killed before it could be emptied: the database has them
    assert restored("stale") == before[-1]
    journal.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), reuse=st.integers(1, 2), every=st.integers(1, 5), S=st.integers(0, 2))
def test_trained_prompts_are_those_of_an_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int, reuse: int, every: int, S: int
) -> None:
    """Killed again and again at random instants and resumed from the last checkpoint; nothing is skipped or doubled,
    and nothing is older than the least bound that can be held (take raises otherwise)."""
    folder, rng = tmp_path_factory.mktemp("journal"), random.Random(seed)
    S = max(S, reuse - 1)
    least = least_max_lag(target_lag=S, batch_size=2, reuse=reuse)
    shape = {"P": 2, "target_lag": S, "max_lag": least, "reuse": reuse, "steps": 12}
    trained: dict[int, list[int]] = {}
    checkpoint = 0
    while len(trained) < 12:
        journal = open_journal(folder, **shape)
        buffer = journal.rewind(step=checkpoint)
        trained = {k: v for k, v in trained.items() if k <= checkpoint}
        assert buffer.accounts()["ledger/balance"] == 0
        assert buffer.accounts()["ledger_tokens/balance"] == 0
        if checkpoint == 0 or rng.random() < 0.9:
            buffer.publish(version=checkpoint, step=checkpoint)
        for _ in range(rng.randint(5, 120)):
            if buffer.step == 12:
                break
            done = buffer.step
            for seat in buffer.lease(rng.randint(1, 3), owner="a", request=0, now=0.0):
                if rng.random() < 0.7:
                    parcel = make_parcel(seat.lease_id, versions=[seat.version], prompt_id=seat.prompt.id)
                    assert buffer.insert(seat.lease_id, parcel)
            if rng.random() < 0.3 and all(seat.attempt < 3 for seat in buffer.leased.values()):
                buffer.release("a")
            seats = {s.lease_id: s.prompt.id for s in buffer.line}
            batch = buffer.take(step=done + 1, num_groups=2, version=done)
            if rng.random() < 0.8:
                journal.commit(buffer, Standing())
            else:
                break  # killed before the commit: the trainer never saw this batch
            if batch:
                trained[done + 1] = [seats[p.lease_id] for p in batch]
                buffer.publish(version=done + 1, step=done + 1)
                if (done + 1) % every == 0:
                    checkpoint = done + 1
                    journal.forget(checkpoint - every, buffer)
        journal.close()
    counts = Counter(prompt for batch in trained.values() for prompt in batch)
    assert sum(counts.values()) == 24
    if reuse == 1:
        assert sorted(counts) == list(range(24))
    else:
        assert max(counts.values()) == reuse


def curriculum_buffer(cursor: int) -> Buffer:
    """Six questions that come again for nine epochs, of which one is always solved and one never."""
    curriculum = Curriculum(CurriculumConfig(rest=1, max_rest=3), full_marks=1.0)
    prompts = (Prompt(id=i, prompt=f"q{i % 6}") for i in range(cursor, 54))
    limits = limits_of(P=2, target_lag=2)
    return Buffer(limits=limits, prompts=curriculum.filter(prompts), curriculum=curriculum, cursor=cursor)


def play_curriculum(folder: Path, *, interrupt: float, rng: random.Random) -> tuple[list[int], dict[str, float]]:
    """Ids of all that is trained, until the data ends; interrupted with a probability per turn, and resumed."""
    journal, trained, checkpoint = Journal(folder, curriculum_buffer), {}, 0
    buffer = journal.rewind(step=0)
    buffer.publish(version=0, step=0)
    while True:
        for seat in buffer.lease(3, owner="a", request=0, now=0.0):
            reward = {4: 1.0, 5: 0.0}.get(seat.prompt.id % 6, 0.5)
            buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version], reward=reward))
        places = {seat.lease_id: seat.prompt.id for seat in buffer.line}
        batch = buffer.take(step=buffer.step + 1, num_groups=2, version=buffer.step)
        if batch == []:
            journal.close()
            return [p for ids in trained.values() for p in ids], buffer.curriculum.metrics()
        if batch:
            trained[buffer.step] = [places[parcel.lease_id] for parcel in batch]
            buffer.publish(version=buffer.step, step=buffer.step)
            checkpoint = buffer.step if buffer.step % 3 == 0 else checkpoint
        journal.commit(buffer, Standing())
        if checkpoint and (buffer.exhausted or rng.random() < 0.3) and rng.random() < interrupt:
            journal.close()
            journal = Journal(folder, curriculum_buffer)
            buffer = journal.rewind(step=checkpoint)
            buffer.publish(version=checkpoint, step=checkpoint)
            trained = {step: ids for step, ids in trained.items() if step <= checkpoint}


def test_a_resumed_run_remembers_what_its_curriculum_has_learnt(tmp_path: Path) -> None:
    expected, metrics = play_curriculum(tmp_path / "whole", interrupt=0.0, rng=random.Random(0))
    assert len(expected) < 50  # some rested
    assert metrics["curriculum/skipped"] > 6
    for seed in range(5):
        found = play_curriculum(tmp_path / str(seed), interrupt=0.8, rng=random.Random(seed))
        assert found == (expected, metrics)


def test_a_prompt_that_a_later_version_had_admitted_waits_for_it_after_a_rewind(tmp_path: Path) -> None:
    """With target lag 0, prompt 4 is leased at version 2. A run that goes back to step 0 leases it no earlier."""
    journal = open_journal(tmp_path, P=2, target_lag=0, max_lag=0)
    buffer, _ = journal.restore()

    def step(number: int) -> None:
        buffer.publish(version=number - 1, step=number - 1)
        for seat in buffer.lease(9, owner="a", request=0, now=0.0):
            buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[seat.version]))
        assert buffer.take(step=number, num_groups=2, version=number - 1) is not None

    for number in (1, 2):
        step(number)
        journal.commit(buffer, Standing())
    buffer.publish(version=2, step=2)
    assert [seat.position for seat in buffer.lease(9, owner="a", request=0, now=0.0)] == [4, 5]
    journal.commit(buffer, Standing())
    buffer = journal.rewind(step=1)
    buffer.publish(version=1, step=1)
    assert (len(buffer.waiting), buffer.room()) == (2, 0)  # 2 and 3 are there for step 2; 4 and 5 wait for version 2
    step(2)
    step(3)
    assert buffer.accounts()["ledger/balance"] == 0
    journal.close()


def test_rewind_to_a_forgotten_step_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, P=1, target_lag=0)
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    for step in range(1, 7):
        (seat,) = buffer.lease(1, owner="a", request=0, now=0.0)
        buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[step - 1]))
        buffer.take(step=step, num_groups=1, version=step - 1)
        buffer.publish(version=step, step=step)
        journal.commit(buffer, Standing())
    journal.forget(3, buffer)
    for step in (2, 7):
        with pytest.raises(ValueError, match=f"cannot go back to step {step}"):
            journal.rewind(step=step)
    again = journal.rewind(step=3)
    assert [s.position for s in again.line] == [3, 4, 5]
    assert again.room() == 0
    again.publish(version=3, step=3)
    batch = again.take(step=4, num_groups=1, version=3)
    assert batch is not None
    assert batch[0].oldest_version == 3
    journal.close()


def test_disk_space_is_used_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, P=1, target_lag=0)
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    sizes = []
    for step in range(1, 41):
        (seat,) = buffer.lease(1, owner="a", request=0, now=0.0)
        buffer.insert(seat.lease_id, make_parcel(seat.lease_id, versions=[step - 1], length=2_000_000))
        buffer.take(step=step, num_groups=1, version=step - 1)
        buffer.publish(version=step, step=step)
        journal.commit(buffer, Standing())
        journal.forget(step - 1, buffer)
        sizes.append(sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()))
    assert max(sizes[20:]) <= max(sizes[:20]) + 8_000_000  # SQLite's write-ahead log
    journal.close()


def test_full_disk_is_a_named_error(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, P=1)
    buffer, _ = journal.restore()
    buffer.publish(version=0, step=0)
    journal.commit(buffer, Standing())
    journal._db.execute("pragma max_page_count = 1")
    buffer.lease(1, owner="a" * 100_000, request=0, now=0.0)
    with pytest.raises(JournalFull, match="free some space and resume"):
        journal.commit(buffer, Standing())
    journal.close()


def test_groups_come_back_from_segments_as_they_went_in(tmp_path: Path) -> None:
    segments = Segments(tmp_path, set())
    groups = [[bytes([i]) * n for n in (10, i * 1000)] for i in range(50)]
    places = [segments.append(g) for g in groups]
    assert [segments.read(p) for p in places] == groups
    segments.close()
    (tmp_path / "000000.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="segment 0 is damaged"):
        segments.read(places[3])


def _insert_for_ever(address: str, acked: object) -> None:
    """A generator that reports each acknowledged prompt."""

    async def main() -> None:
        client = AsyncReplayClient(address)
        await client.hello()
        while True:
            for lease in await client.lease(4):
                length = (3000, 7000)[lease.prompt.id % 2]  # through the socket, in a file
                group = make_group(lease.id, versions=[lease.version], length=length, prompt_id=lease.prompt.id)
                if await client.insert(group):
                    acked.put(lease.prompt.id)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_acknowledged_inserts_survive_kill_of_the_server_at_any_instant(tmp_path: Path) -> None:
    run = make_run(
        str(tmp_path), training={"batch_size": 400, "steps": 100}, target_lag=9, order="fifo", lease_timeout_s=3600
    )
    spawn = multiprocessing.get_context("spawn")
    stop, acked = spawn.Event(), spawn.SimpleQueue()
    seen: set[int] = set()
    rng = random.Random(0)
    for kill in range(3):
        process = spawn.Process(target=server.serve, args=(run, stop))
        process.start()
        address = server.read_address(tmp_path, timeout_s=30)
        trainer = ReplayClient(address, role="trainer")
        if kill == 0:
            trainer.publish(version=0, step=0)
            generator = spawn.Process(target=_insert_for_ever, args=(address, acked), daemon=True)
            generator.start()
        enough = len(seen) + rng.randint(20, 300)
        while len(seen) < enough:
            seen.add(acked.get())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        trainer.close()
    generator.kill()
    generator.join(10)
    while not acked.empty():
        seen.add(acked.get())
    found = server.open_server(run, bind="tcp://127.0.0.1:*")
    buffer = found.service.buffer
    assert seen <= {s.prompt.id for s in buffer.buffered.values()}
    assert buffer.accounts()["ledger/balance"] == 0
    assert list((tmp_path / "replay" / "left").glob("*.0"))
    found.close()
