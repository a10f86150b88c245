"""Which trainer ranks the replay server misses: from their beats, whatever else they do or do not send."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from replay_helpers import make_run, serving

from asyncrl.replay import messages, ranks, wire
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.messages import Missing
from asyncrl.replay.peers import Peers
from asyncrl.status import _server_lines

SEQ = count()


class World:
    """A trainer's ranks, each a process on a host of its own; `beat` is heard at `now`."""

    def __init__(self, size: int, *, peers: Peers | None = None, name: str = "a") -> None:
        self.size, self.peers, self.name = size, peers if peers is not None else Peers(), name

    def beat(self, rank: int, now: float, *, does: str = "trains step 5", for_s: float = 0.0) -> None:
        host, pid = f"host{rank}", 100 + rank
        beat = messages.Beat(size=self.size, pid=pid, host=host, does=does, for_s=for_s)
        envelope = wire.Envelope(f"{self.name}{rank}".ljust(16, "0"), next(SEQ), 0, "trainer", rank, beat)
        peer = self.peers.hear(envelope, b"", now)
        if not peer.greeted:
            self.peers.introduce(peer, messages.Hello(pid=pid, host=host))
        self.peers.beat(peer, beat, now)

    def missing(self, now: float) -> Missing:
        return ranks.missing(self.peers, now, silent_s=10.0)


def test_ranks_that_are_all_heard_are_not_missing():
    world = World(2)
    world.beat(0, 0.0, for_s=500.0)
    world.beat(1, 1.0, for_s=500.0)
    assert world.missing(8.0) == Missing()


def test_a_silent_rank_is_named_with_its_host_and_process_while_the_others_wait():
    world = World(3)
    for rank in range(3):
        world.beat(rank, 0.0)
    world.beat(0, 45.0, for_s=40.0)
    world.beat(2, 45.0, for_s=43.0)
    expected = "trainer waits for rank 1 (host host1, pid 101), not heard from for 45 s"
    assert world.missing(45.0) == Missing(why=expected, for_s=40.0)


def test_rank_0_is_named_like_any_other():
    world = World(2)
    world.beat(0, 0.0)
    world.beat(1, 20.0, for_s=19.0)
    assert world.missing(20.0).why == "trainer waits for rank 0 (host host0, pid 100), not heard from for 20 s"


def test_nobody_waits_for_a_silent_rank_while_the_others_get_on():
    """Its way to the server may be cut, and not that to the other ranks."""
    world = World(2)
    for rank in range(2):
        world.beat(rank, 0.0)
    world.beat(0, 2000.0, for_s=0.5)
    expected = "trainer rank 1 (host host1, pid 101), not heard from for 2000 s"
    assert world.missing(2000.0) == Missing(why=expected, for_s=0.5)


def test_a_trainer_of_one_rank_that_falls_silent_is_named():
    world = World(1)
    world.beat(0, 0.0)
    assert world.missing(30.0) == Missing(why="trainer (host host0, pid 100), not heard from for 30 s", for_s=30.0)


def test_a_rank_that_has_never_come_is_named():
    world = World(2)
    for now in (0.0, 50.0):
        world.beat(0, now, does="joins the other ranks", for_s=now)
    assert world.missing(50.0) == Missing(why="trainer waits for rank 1, not heard from at all for 50 s", for_s=50.0)


def test_of_many_silent_ranks_some_are_named():
    world = World(8)
    for rank in range(8):
        world.beat(rank, 0.0)
    world.beat(0, 20.0, for_s=20.0)
    why = world.missing(20.0).why
    assert why.startswith("trainer waits for rank 1 (host host1, pid 101), not heard from for 20 s, rank 2 (")
    assert why.endswith("rank 4 (host host4, pid 104), not heard from for 20 s, and 3 more ranks")


def test_a_rank_that_said_goodbye_is_not_missed():
    world = World(2)
    for rank in range(2):
        world.beat(rank, 0.0)
    left = world.peers.in_service("trainer")[1]
    left.replaced = left.left = True
    world.beat(0, 60.0, for_s=60.0)
    assert world.missing(60.0) == Missing()


def test_a_new_trainer_is_not_said_to_wait_for_ranks_of_a_larger_one_that_died():
    old = World(3)
    for rank in range(3):
        old.beat(rank, 0.0)
    new = World(2, peers=old.peers, name="b")
    for peer in old.peers.known.values():
        peer.silent = True
    for rank in range(2):
        new.beat(rank, 100.0)
    assert new.missing(101.0) == Missing()
    assert [p.index for p in new.peers.in_service("trainer") if p.incarnation[0] == "a"] == [0]  # until a rewind


def test_a_rank_is_remembered_however_long_it_is_silent(tmp_path: Path):
    with serving(make_run(str(tmp_path))) as made:
        service = made.service
    world = World(2, peers=service.peers)
    for rank in range(2):
        world.beat(rank, 0.0)
    world.beat(0, 1700.0, for_s=1699.0)
    service.tick(1700.0)
    assert "rank 1 (host host1, pid 101), not heard from for 1700 s" in world.missing(1700.0).why


def test_status_says_what_each_rank_does_and_who_is_missing(tmp_path: Path):
    with serving(make_run(str(tmp_path))) as made:
        rank = ReplayClient(made.address, role="trainer", index=1)
        assert rank.beat(size=2, does="waits for the next order of rank 0", for_s=3.0) == Missing()
        lines = _server_lines(rank.status())
        rank.close()
    assert any(line.endswith(", waits for the next order of rank 0 for 3 s") for line in lines)
