"""A full disk under the journal, and clocks that jump."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from replay_helpers import make_group, make_run, serving

from asyncrl.replay import server
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.database import JournalFull


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A file system of `size` at `folder`; yields what makes it larger. Skips where nobody lets us mount one."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    try:
        yield lambda larger: subprocess.run(["mount", "-o", f"remount,size={larger}", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def insert_until(address: str, acknowledged: list[int], enough: int) -> None:
    """Groups of 170 KB, one after the other; whatever is acknowledged is noted."""
    client = AsyncReplayClient(address)
    try:
        await client.hello()
        while len(acknowledged) < enough:
            for lease in await client.lease(1):
                group = make_group(lease.id, versions=[0], length=10_000, prompt_id=lease.prompt.id)
                async with asyncio.timeout(5):
                    if await client.insert(group):
                        acknowledged.append(lease.prompt.id)
    finally:
        client.close()


def fill_up(run, acknowledged: list[int]) -> None:
    """Insert until the server ends; its error is raised here."""
    with serving(run) as made:
        trainer = ReplayClient(made.address, role="trainer")
        trainer.publish(version=0, step=0)
        trainer.close()
        with pytest.raises(TimeoutError):  # the server has ended without an acknowledgement
            asyncio.run(insert_until(made.address, acknowledged, 10_000))


def test_a_full_disk_is_a_named_error_and_no_acknowledged_insert_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, "3m") as enlarge:
        run = make_run(str(folder), training={"batch_size": 500, "steps": 2}, target_lag=0)
        acknowledged: list[int] = []
        with pytest.raises(JournalFull, match="free some space and resume the run"):
            fill_up(run, acknowledged)
        assert 3 <= len(acknowledged) < 30
        enlarge("60m")
        with serving(run) as made:
            buffered = {seat.prompt.id for seat in made.service.buffer.buffered.values()}
            assert set(acknowledged) <= buffered
            assert made.service.buffer.accounts()["ledger/balance"] == 0
            asyncio.run(insert_until(made.address, acknowledged, len(acknowledged) + 20))  # and it goes on
            assert made.service.buffer.accounts()["ledger/balance"] == 0


def test_a_clock_that_jumps_expires_no_lease_and_declares_nobody_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended machine or a stopped server: the time that passed meanwhile was nobody's silence."""
    run = make_run(str(tmp_path), training={"batch_size": 4}, target_lag=0)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    clock = {"now": 1000.0}
    monkeypatch.setattr(server.time, "monotonic", lambda: clock["now"])
    buffer = made.service.buffer
    buffer.publish(version=0, step=0)
    made.turn()
    buffer.lease(2, owner="a", request=0, now=made._now())
    for jump in (3600.0, 86400.0, -50.0, 0.0, 7.0):
        clock["now"] += jump
        made.turn()
    assert len(buffer.leased) == 2
    assert buffer.accounts()["ledger/balance"] == 0
    monkeypatch.undo()
    made.close()


def test_a_clock_that_stands_still_or_goes_back_does_no_harm_to_the_buffer(tmp_path: Path) -> None:
    run = make_run(str(tmp_path), training={"batch_size": 4}, target_lag=0, lease_timeout_s=10.0)
    made = server.open_server(run, bind="tcp://127.0.0.1:*")
    buffer, now = made.service.buffer, time.monotonic()
    buffer.publish(version=0, step=0)
    buffer.lease(1, owner="a", request=0, now=now)
    for later in (0.0, -1e6, 0.0, 9.0):
        made.service.tick(now + later)
    assert len(buffer.leased) == 1
    made.service.tick(now + 11.0)
    assert len(buffer.leased) == 0
    made.close()
