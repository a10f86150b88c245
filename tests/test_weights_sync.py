"""Weight syncs between real processes over gloo and ipc: 3 trainer ranks, generators that come, fail and go."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time

import msgspec
import psutil
import pytest
import torch
import weights_peers as peers

from asyncrl.config import WeightsConfig
from asyncrl.weights.control import Control
from asyncrl.weights.messages import Commit, Go, Prepare, SyncReport
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.sync import FRESH_S

CONFIG = {"bucket_bytes": 4096, "num_buffers": 2, "timeout_s": 6.0}
BOUND_S = 45.0
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


class Peer:
    """One child process and its pipe. Every wait is bounded."""

    def __init__(self, context, target, *args):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def say(self, do, **more):
        peers.say(self.pipe, {"do": do, **more})

    def hear(self, key):
        """The next message that has `key`; others are passed over."""
        deadline = time.monotonic() + BOUND_S
        while True:
            assert self.pipe.poll(max(deadline - time.monotonic(), 0)), f"no {key!r} within {BOUND_S} s"
            message = peers.hear(self.pipe)
            if key in message:
                return message[key]
            assert "error" not in message, message

    def held(self):
        self.say("show")
        return self.hear("held")

    def discarded(self):
        self.say("show")
        return self.hear("discarded")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(BOUND_S)


class World:
    def __init__(self, context):
        self._context, self._peers, self.trainers = context, [], []

    def train(self, ranks=3, orders=None, rows=peers.ROWS, device="cpu", **config):
        self.config = CONFIG | {"backend": self.backend} | config
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        orders = orders or ["sorted"] * ranks
        self.trainers = [
            self._add(peers.trainer, r, ranks, port, self.config, orders, rows, device) for r in range(ranks)
        ]
        self.address, *_ = [t.hear("address") for t in self.trainers]

    def generator(self, index, device="cpu", **fault):
        """A generator that has said hello."""
        before = self.newcomers()
        peer = self._add(peers.generator, self.address, index, f"life-{len(self._peers)}", self.config, fault, device)
        self.until_newcomers(before + 1)
        return peer

    def publish(self, version):
        self.begin(version)
        return self.reports()[0]

    def begin(self, version):
        for trainer in self.trainers:
            trainer.say("publish", version=version)
        for trainer in self.trainers:
            trainer.hear("publishing")

    def reports(self):
        return [msgspec.convert(t.hear("report"), SyncReport) for t in self.trainers]

    def newcomers(self):
        self.trainers[0].say("count")
        return self.trainers[0].hear("newcomers")

    def until_newcomers(self, count):
        deadline = time.monotonic() + BOUND_S
        while (now := self.newcomers()) != count:
            assert time.monotonic() < deadline, f"{now} newcomers, not {count}, after {BOUND_S} s"

    def close(self):
        for peer in self._peers:
            peer.kill()

    def _add(self, target, *args):
        peer = Peer(self._context, target, *args)
        self._peers.append(peer)
        return peer


@pytest.fixture(scope="session")
def context():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["asyncrl.weights.sender", "asyncrl.weights.follower", "torch.distributed.fsdp"])
    return made


@pytest.fixture
def world(context, request):
    """Over gloo, or over what a test `both_ways` is run with."""
    made = World(context)
    made.backend = getattr(request, "param", "gloo")
    yield made
    made.close()


both_ways = pytest.mark.parametrize("world", ["gloo", "ipc"], indirect=True)


def served(version, rows=peers.ROWS):
    return peers.fingerprint(peers.values(version, rows))


@both_ways
def test_every_kind_of_tensor_arrives_from_three_ranks_at_two_generators(world):
    world.train()
    generators = [world.generator(0), world.generator(1)]
    for version in (0, 1, 5):  # versions may be skipped
        world.begin(version)
        reports = world.reports()
        assert [(r.version, r.receivers, len(r.dropped)) for r in reports] == [(version, 2, 0)] * 3
        assert [g.held() == served(version) for g in generators] == [True, True]
    assert world.newcomers() == 0


@both_ways
def test_an_engine_of_two_ranks_and_one_of_one_share_a_broadcast(world):
    world.train(ranks=1)
    wide, narrow = world.generator(0, ranks=2), world.generator(1)
    for version in (0, 1):
        assert world.publish(version).receivers == 2
        assert wide.held() == narrow.held() == served(version)


def test_with_nobody_there_publish_returns_at_once(world):
    world.train(ranks=2)
    report = world.publish(3)
    assert (report.receivers, report.dropped, report.bytes) == (0, (), 0)
    assert report.total_s < CONFIG["timeout_s"]


def test_another_order_on_one_rank_is_an_error_on_all_before_anything_is_gathered(world):
    world.train(orders=["sorted", "reversed", "sorted"])
    generator = world.generator(0)
    world.begin(0)
    errors = [t.hear("error") for t in world.trainers]
    assert all("trainer ranks [1] would send other weights than rank 0" in error for error in errors)
    assert "tensor 0 is uneven" in errors[1]
    assert generator.held() == {}


def test_a_late_joiner_gets_the_current_version_and_the_others_are_left_alone(world):
    world.train(ranks=2)
    first = world.generator(0)
    world.publish(4)
    second = world.generator(1)
    report = world.publish(4)
    assert report.receivers == 1
    assert first.hear("version") == second.hear("version") == 4
    assert second.held() == served(4)
    assert world.publish(5).receivers == 2
    assert first.hear("version") == second.hear("version") == 5
    assert first.held() == second.held() == served(5)


@both_ways
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_generator_killed_mid_broadcast_is_dropped_and_its_replacement_gets_the_current_version(world, ranks):
    rows = peers.MANY_ROWS
    world.train(ranks=ranks, rows=rows, bucket_bytes=1 << 20)
    doomed, other = world.generator(0, at="load", signal=KILL, after=1), world.generator(1)
    assert world.publish(1).receivers == 2
    report = world.publish(2)  # killed while it loads the first of 12 buckets
    assert report.receivers == 1
    assert [(d.index, d.stage) for d in report.dropped] == [(0, "broadcast")]
    assert report.total_s < CONFIG["timeout_s"]
    doomed.process.join(BOUND_S)
    assert other.held() == served(2, rows)
    replacement = world.generator(0)
    assert world.publish(2).receivers == 1
    assert replacement.held() == served(2, rows)
    assert world.publish(3).receivers == 2
    assert replacement.held() == other.held() == served(3, rows)


@pytest.mark.parametrize("where", ["join", "commit"])
def test_a_generator_killed_at_the_door_or_at_the_end_is_dropped(world, where):
    world.train(ranks=2)
    world.generator(0, at=where, signal=KILL)
    other = world.generator(1)
    report = world.publish(0)
    assert [(d.index, d.stage) for d in report.dropped] == [(0, "broadcast")]
    assert report.receivers == 1
    assert other.held() == served(0)


def test_a_generator_killed_while_it_is_prepared_is_dropped(world):
    world.train(ranks=2)
    doomed, other = world.generator(0), world.generator(1)
    os.kill(doomed.process.pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
    world.begin(0)
    doomed.kill()
    report = world.reports()[0]
    assert report.receivers == 1
    assert {d.stage for d in report.dropped} <= {"prepare"}
    assert other.held() == served(0)


def test_a_generator_stopped_a_moment_before_a_publish_costs_the_others_one_bounded_stage(world):
    world.train(ranks=1, timeout_s=3.0)
    sleeper, other = world.generator(0), world.generator(1)
    assert world.publish(0).receivers == 2
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    report = world.publish(1)
    assert [d.index for d in report.dropped] == [0]
    assert report.receivers == 1
    assert other.held() == served(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "where"), [("gloo", "idle"), ("gloo", "load"), ("ipc", "load"), ("gloo", "commit")], indirect=["world"]
)
def test_a_stopped_generator_costs_one_bounded_stage_and_catches_up_when_it_wakes(world, where):
    rows = peers.MANY_ROWS if where == "load" else peers.ROWS
    timeout_s = 12.0 if where == "idle" else 6.0  # ZeroMQ notices after half of it
    world.train(ranks=2, rows=rows, bucket_bytes=1 << 20 if where == "load" else 4096, timeout_s=timeout_s)
    fault = {} if where == "idle" else {"at": where, "signal": STOP, "after": 0}
    sleeper, other = world.generator(0, **fault), world.generator(1)
    assert world.publish(0).receivers == 2
    if where == "idle":
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        time.sleep(FRESH_S + 1)  # longer without a hello than anybody is trusted to be there
    report = world.publish(1)
    stage = "prepare" if where == "idle" else "broadcast"
    assert [(d.index, d.stage) for d in report.dropped] == [(0, stage)]
    assert report.receivers == 1
    assert report.total_s < 3 * CONFIG["timeout_s"]
    assert other.held() == served(1, rows)
    os.kill(sleeper.process.pid, signal.SIGCONT)
    if where == "idle":
        world.until_newcomers(1)
        assert world.publish(1).receivers == 1
        assert sleeper.held() == served(1)


@both_ways
def test_corrupted_bytes_are_discarded_and_never_served(world):
    world.train(ranks=2)
    unlucky, other = world.generator(0), world.generator(1, at="corrupt")
    report = world.publish(0)
    assert [(d.index, d.stage) for d in report.dropped] == [(1, "checksum")]
    assert "differ from what was sent" in report.dropped[0].reason
    assert unlucky.held() == served(0)
    world.until_newcomers(1)
    other.say("show")
    assert other.hear("serves") == -1
    assert world.publish(0).receivers == 1
    assert other.held() == served(0)


@pytest.mark.parametrize("where", ["join", "load", "commit"])
def test_an_exception_in_one_engine_costs_that_engine_one_version(world, where):
    world.train(ranks=2)
    faulty, other = world.generator(0, at=where, error="no memory", after=0), world.generator(1)
    if where == "join":
        world.publish(0)
        other.kill()  # the group changes, so the next publish has a door to stumble at
        other = world.generator(2)
    else:
        world.publish(0)
    report = world.publish(1)
    if where == "join":  # may be another's fault: tried again
        assert (report.receivers, report.dropped) == (2, ())
    else:
        assert [(d.index, d.stage) for d in report.dropped] == [(0, where)]
        assert "no memory" in report.dropped[0].reason
        faulty.say("show")
        assert faulty.hear("held") == served(0)
    assert other.held() == served(1)
    assert world.publish(2).receivers == 2
    assert faulty.held() == other.held() == served(2)


def test_an_engine_that_fails_every_time_ends_its_generator(world):
    world.train(ranks=1)
    hopeless = world.generator(0, at="load", error="no memory", always=True)
    for version in range(3):
        world.until_newcomers(1)
        assert world.publish(version).dropped[0].stage == "load"
    assert "3 weight syncs failed in a row" in hopeless.hear("ended")


def test_a_generator_outlives_its_trainer_and_finds_the_next_one_at_the_same_address(world):
    world.train(ranks=1)
    generator = world.generator(0)
    world.publish(7)
    assert generator.hear("version") == 7
    world.trainers[0].kill()
    world.train(ranks=1, bind=world.address)
    world.until_newcomers(1)
    assert world.publish(8).receivers == 1
    assert generator.held() == served(8)


def test_a_trainer_that_dies_leaves_no_generator_in_between(world):
    world.train(ranks=1)
    generator = world.generator(0, at="load", signal=STOP, after=0)
    world.publish(0)
    world.begin(1)
    until_stopped(generator)
    world.trainers[0].kill()
    os.kill(generator.process.pid, signal.SIGCONT)
    generator.say("stop")
    assert generator.hear("discarded") == 1


@both_ways
def test_a_trainer_that_freezes_is_not_waited_for_longer_than_a_stage(world):
    rows = peers.MANY_ROWS
    world.train(ranks=1, rows=rows, bucket_bytes=1 << 20, timeout_s=2.0)
    generator = world.generator(0, at="load", signal=STOP, after=0)
    world.publish(0)
    world.begin(1)
    until_stopped(generator)
    os.kill(world.trainers[0].process.pid, signal.SIGSTOP)  # its store answers nobody from here on
    os.kill(generator.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + BOUND_S / 2
    while not generator.discarded():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert generator.held() == served(0, rows)


def until_stopped(peer):
    deadline = time.monotonic() + BOUND_S
    while psutil.Process(peer.process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "device"), [pytest.param("nccl", "cuda:1", marks=two_gpus), ("ipc", "cuda:0")], indirect=["world"]
)
@pytest.mark.parametrize("how", [KILL, STOP])
def test_from_a_gpu_a_generator_lost_mid_broadcast_is_dropped_and_its_replacement_catches_up(world, device, how):
    rows = peers.MANY_ROWS
    world.train(ranks=1, rows=rows, bucket_bytes=1 << 20, device="cuda:0", timeout_s=20.0)
    doomed = world.generator(0, device=device, at="load", signal=how, after=1)
    assert world.publish(1).receivers == 1
    assert doomed.held() == served(1, rows)
    report = world.publish(2)
    assert [(d.index, d.stage) for d in report.dropped] == [(0, "broadcast")]
    doomed.kill()
    replacement = world.generator(1, device=device)
    assert world.publish(2).receivers == 1
    assert replacement.held() == served(2, rows)


def test_a_receiver_that_is_known_is_told_to_go_and_to_commit_and_nothing_else(world, monkeypatch):
    tensors = {"a": torch.arange(3000, dtype=torch.float32)}
    config = msgspec.convert(CONFIG, WeightsConfig)
    sender = WeightSender(tensors=tensors.items, rank=0, config=config, device="cpu")
    said, send = [], Control.send
    monkeypatch.setattr(Control, "send", lambda *args: (said.append(type(args[2])), send(*args)))
    world._add(peers.generator, sender.address, 0, "life-0", CONFIG, {}, "cpu")
    deadline = time.monotonic() + BOUND_S
    while sender.newcomers() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        assert [sender.publish(version).receivers for version in range(3)] == [1, 1, 1]
    finally:
        sender.close()
    assert said == [Prepare, Go, Commit, Go, Commit, Go, Commit]
