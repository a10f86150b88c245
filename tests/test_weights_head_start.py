"""A receiver's head start: what has arrived before its engine comes for it, and what becomes of it if nobody comes."""

import threading
import time
from contextlib import suppress

import pytest
import torch

from asyncrl.weights.messages import JoinSpec, TensorSpec
from asyncrl.weights.plan import buckets, make_plan
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import (
    WireBroken,
    announce,
    await_announcement,
    give_up,
    serve_store,
    wake,
    watch_store,
)
from asyncrl.weights.wire import open_wire

BOUND_S = 20.0
SIZE = 1024
SPECS = [TensorSpec(f"t{i}", "int32", (SIZE,)) for i in range(5)]


class Pair:
    """A sender's end in this thread, a receiver that holds what it loaded, and a plan of five buckets."""

    def __init__(self, *, head_start, timeout_s=BOUND_S):
        self.plan = make_plan(SPECS, SIZE * 4, 3)
        self.store = serve_store("127.0.0.1", BOUND_S)
        self.spec = JoinSpec(host="127.0.0.1", port=self.store.port, generation=1, first_rank=0, world_size=2,
                             backend="gloo", timeout_s=timeout_s)  # fmt: skip
        theirs = JoinSpec(host="127.0.0.1", port=self.store.port, generation=1, first_rank=1, world_size=2,
                          backend="gloo", timeout_s=timeout_s)  # fmt: skip
        self.receiver, self.held, self.number = Receiver(), {}, 0
        joining = threading.Thread(
            target=self.receiver.join, args=(theirs, 0, "cpu"), kwargs={"head_start": head_start}
        )
        joining.start()
        self.watch = watch_store(self.store, self.spec)
        self.wire = open_wire(self.store, self.spec, 0, torch.device("cpu"), self.watch)
        joining.join(BOUND_S)

    def begin(self, version, digest=None):
        """Announce and send everything, in a thread of its own."""
        announce(self.store, self.spec, self.number, digest or self.plan.digest)
        self.number += 1
        self.sending = threading.Thread(target=self._send, args=(version,), daemon=True)
        self.sending.start()

    def _send(self, version):
        with suppress(WireBroken):
            for index, bucket in enumerate(buckets(self.plan)):
                self.wire.start(bucket_of(version, index)[: bucket.nbytes])
                self.wire.order(self.watch)

    def receive(self):
        sums = self.receiver.receive(self.plan, lambda new: self.held.update({n: t.clone() for n, t in new}))
        self.sending.join(BOUND_S)
        return sums

    def arrived(self, version):
        """How many of the receiver's buffers hold that version's bytes."""
        return sum(torch.equal(b, bucket_of(version, i)) for i, b in enumerate(self.receiver._buffers))

    def close(self):
        self.receiver.leave()
        self.wire.close()


def bucket_of(version, index):
    return torch.full((SIZE,), 100 * version + index, dtype=torch.int32).view(torch.uint8)


def served(version):
    return {f"t{i}": 100 * version + i for i in range(len(SPECS))}


def shown(held):
    assert all((t == t[0]).all() for t in held.values())
    return {name: int(t[0]) for name, t in held.items()}


def until(condition):
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.fixture
def pair(request):
    made = Pair(**{"head_start": True, **getattr(request, "param", {})})
    yield made
    made.close()


def first_sync(pair):
    """Nobody knows the plan before."""
    pair.begin(1)
    pair.receive()
    assert shown(pair.held) == served(1)


def test_as_many_buckets_as_there_are_buffers_arrive_before_the_engine_comes(pair):
    first_sync(pair)
    pair.begin(2)
    until(lambda: pair.arrived(2) == 3)
    assert shown(pair.held) == served(1)  # nothing is loaded before it is asked for
    sums = pair.receive()
    assert shown(pair.held) == served(2)
    assert len(sums) == 5
    pair.begin(3)
    assert pair.receive() != sums
    assert shown(pair.held) == served(3)


@pytest.mark.parametrize("pair", [{"head_start": False}], indirect=True)
def test_without_one_nothing_arrives_early(pair):
    first_sync(pair)
    pair.begin(2)
    time.sleep(0.3)
    assert pair.arrived(2) == 0
    pair.receive()
    assert shown(pair.held) == served(2)


def test_a_plan_that_is_not_known_yet_is_left_to_the_engine(pair):
    first_sync(pair)
    pair.begin(2, digest="another")
    time.sleep(0.3)
    assert pair.arrived(2) == 0
    pair.receive()
    assert shown(pair.held) == served(2)
    pair.begin(3)
    until(lambda: pair.arrived(3) == 3)
    pair.receive()
    assert shown(pair.held) == served(3)


@pytest.mark.parametrize("pair", [{"timeout_s": 2.0}], indirect=True)
def test_an_engine_that_never_comes_leaves_the_group_and_a_late_one_is_told(pair):
    first_sync(pair)
    pair.begin(2)
    until(lambda: pair.receiver._wire is None)
    with pytest.raises(WireBroken, match="did not come"):
        pair.receive()
    assert shown(pair.held) == served(1)


def test_a_sender_that_gives_up_releases_it(pair):
    first_sync(pair)
    announce(pair.store, pair.spec, 1, pair.plan.digest)
    until(lambda: pair.receiver._begun)
    give_up(pair.store, 1, "the test is over")
    until(lambda: pair.receiver._wire is None)


def test_leaving_ends_its_thread():
    before = threading.active_count()
    pair = Pair(head_start=True)
    pair.close()
    until(lambda: threading.active_count() <= before)


def test_an_announcement_is_heard_by_each_member_once_and_none_piles_up():
    store = serve_store("127.0.0.1", BOUND_S)
    spec = JoinSpec(host="127.0.0.1", port=store.port, generation=7, first_rank=0, world_size=3, backend="gloo",
                    timeout_s=BOUND_S)  # fmt: skip
    before = store.num_keys()
    announce(store, spec, 4, "a")
    assert [await_announcement(store, spec, rank) for rank in (1, 2)] == [(4, "a"), (4, "a")]
    assert store.num_keys() == before
    for number in range(5):
        announce(store, spec, number, "b")  # nobody listens
    assert store.num_keys() == before + 2
    assert await_announcement(store, spec, 1) == (4, "b")
    wake(store, spec, 1)
    assert await_announcement(store, spec, 1) is None
