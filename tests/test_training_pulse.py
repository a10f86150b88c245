"""A trainer rank's pulse against a real replay server: it names who is missing, and ends the process in time."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_helpers import make_run, serving

from asyncrl.config import SuperviseConfig
from asyncrl.replay import diagnosis, server
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.exchange import RankMissing
from asyncrl.training.pulse import Pulse


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Server]:
    """Whoever is silent for 0.3 s is missing."""
    monkeypatch.setattr(diagnosis, "SILENT_S", 0.3)
    run = make_run(str(tmp_path))
    run.config.supervise = SuperviseConfig(heartbeat_s=0.05)
    with serving(run) as made:
        yield made


def pulse_of(made: server.Server, rank: int, ends: queue.SimpleQueue, *, limit_s: float = 1.0) -> Pulse:
    def connect() -> ReplayClient:
        return ReplayClient(made.address, role="trainer", index=rank)

    return Pulse(connect, size=2, every_s=0.05, limit_s=limit_s, end=ends.put)


def test_a_rank_that_waits_for_a_silent_one_ends_with_its_name(made, caplog):
    caplog.set_level(logging.INFO, logger="asyncrl.training.pulse")
    ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    silent = ReplayClient(made.address, role="trainer", index=1)
    silent.beat(size=2, does="trains step 1", for_s=0.0)
    pulse = pulse_of(made, 0, ends)
    pulse.does("trains step 1")
    error = ends.get(timeout=20)
    pulse.close()
    silent.close()
    assert isinstance(error, RankMissing)
    assert str(error).startswith("trainer waits for rank 1 (host ")
    assert "rank 1 (host " in caplog.text


def test_a_rank_that_gets_on_does_not_end(made):
    ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    silent = ReplayClient(made.address, role="trainer", index=1)
    silent.beat(size=2, does="", for_s=0.0)
    pulse, beats = pulse_of(made, 0, ends, limit_s=0.5), 0
    while beats < 40:  # two seconds' worth
        pulse.does(f"trains step {beats}")
        with pytest.raises(queue.Empty):
            ends.get(timeout=0.05)
        beats += 1
    pulse.close()
    silent.close()


def test_when_all_ranks_beat_again_nobody_is_missing(made, caplog):
    caplog.set_level(logging.INFO, logger="asyncrl.training.pulse")
    ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    first = pulse_of(made, 0, ends, limit_s=600.0)
    while "rank 1, not heard from at all" not in caplog.text:
        assert ends.empty()
    second = pulse_of(made, 1, ends, limit_s=600.0)
    while "every rank is heard from again" not in caplog.text:
        assert ends.empty()
    for pulse in (first, second):
        pulse.close()


def test_a_rank_that_ends_says_goodbye(made):
    ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    pulse_of(made, 0, ends).close()
    looks_on = ReplayClient(made.address, role="status")
    assert [p["role"] for p in looks_on.status()["processes"]] == ["status"]
    looks_on.close()
