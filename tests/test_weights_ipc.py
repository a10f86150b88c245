"""The group in which receivers read the sender's memory: nothing is copied, nobody else let in, and if it cannot be."""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import threading
import time

import msgspec
import pytest
import torch

from asyncrl.config import WeightsConfig
from asyncrl.weights import ipc
from asyncrl.weights.follower import follow
from asyncrl.weights.messages import JoinSpec
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.store import WireBroken, connect_store, prefixed, serve_store
from asyncrl.weights.wire import make_buffer, open_wire

BOUND_S = 20.0
CPU = torch.device("cpu")


class Engine:
    """Holds tensors."""

    num_weight_ranks = 1

    def __init__(self):
        self.version, self.held, self._staged, self._receiver = -1, {}, {}, Receiver()

    async def join_weights(self, spec):
        self.backend = spec.backend
        await asyncio.to_thread(self._receiver.join, spec, 0, "cpu")

    async def receive_weights(self, plan):
        return await asyncio.to_thread(self._receiver.receive, plan, self._load)

    async def commit_weights(self, version):
        self.version, self.held = version, dict(self._staged)

    async def discard_weights(self):
        self._staged = {}

    def activity(self):
        return {"pause_s": 0.0}

    def close(self):
        self._receiver.leave()

    def _load(self, tensors):
        self._staged |= {name: tensor.clone() for name, tensor in tensors}


@contextlib.asynccontextmanager
async def trained(engines, tensors):
    """A sender of `tensors` that all engines follow and have said hello to."""
    config = WeightsConfig(bucket_bytes=4096, timeout_s=5.0, backend="ipc")
    sender = WeightSender(tensors=tensors.items, rank=0, config=config, device="cpu")
    following = [
        asyncio.ensure_future(
            follow(sender.address, engine, index=i, incarnation=secrets.token_hex(4), config=config,
                   on_version=lambda version: None)
        )
        for i, engine in enumerate(engines)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + BOUND_S
        while sender.newcomers() < len(engines):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        yield sender
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for engine in engines:
            engine.close()
        sender.close()


def group(readers):
    """A store and the specs of one sender and so many receivers."""
    store = serve_store("127.0.0.1", 5.0)
    spec = JoinSpec(host="127.0.0.1", port=store.port, generation=1, first_rank=0, world_size=1 + readers,
                    backend="ipc", timeout_s=5.0)  # fmt: skip
    return store, spec


def opened(readers):
    """The wires of one group, the sender's first."""
    store, spec = group(readers)
    wires = [None] * (1 + readers)

    def join(rank):
        own = connect_store(spec) if rank else store
        wires[rank] = open_wire(own, spec, rank, CPU, lambda: None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1 + readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert all(wires)
    return wires


def test_receivers_read_the_senders_own_memory_and_it_is_not_written_over_before_they_are_done():
    sender, one, two = opened(2)
    buffer = make_buffer(sender.spec, 4096, CPU, sends=True)
    buffer.fill_(7)
    for wire in (one, two):
        wire.start(make_buffer(wire.spec, 4096, CPU, sends=False))
    sender.start(buffer)
    theirs = [wire.order(lambda: None) for wire in (one, two)]
    assert [(t.device.type, int(t.sum())) for t in theirs] == [("cpu", 7 * 4096)] * 2
    buffer[100] = 9  # as a sender must not: nothing was copied
    assert [int(t[100]) for t in theirs] == [9, 9]
    one.drain(lambda: None)  # gives it back
    tries = iter(range(50))

    def watch():
        if next(tries, None) is None:
            raise WireBroken("still lent")

    with pytest.raises(WireBroken, match="still lent"):
        sender.drain(watch)
    for wire in (sender, one, two):
        wire.close()


def test_what_a_receiver_writes_stays_its_own():
    sender, one, two = opened(2)
    buffer = make_buffer(sender.spec, 64, CPU, sends=True)
    for wire in (one, two):
        wire.start(make_buffer(wire.spec, 64, CPU, sends=False))
    sender.start(buffer)
    theirs = [wire.order(lambda: None) for wire in (one, two)]
    theirs[0].fill_(5)
    assert [int(t.sum()) for t in (buffer, theirs[1])] == [0, 0]
    for wire in (sender, one, two):
        wire.close()


@pytest.mark.parametrize("who", ["the sender", "a receiver"])
def test_an_end_that_leaves_breaks_the_wire_of_the_other_at_once(who):
    sender, receiver = opened(1)
    receiver.start(make_buffer(receiver.spec, 64, CPU, sends=False))
    if who == "the sender":
        sender.close()
        with pytest.raises(WireBroken, match="the sender has left"):
            receiver.order(lambda: None)
        receiver.close()
    else:
        sender.start(make_buffer(sender.spec, 64, CPU, sends=True))
        receiver.close()
        with pytest.raises(WireBroken, match="receiver 1 "):
            sender.drain(lambda: None)
        sender.close()


def test_a_receiver_that_leaves_is_missed_while_another_still_reads():
    sender, reading, leaving = opened(2)
    sender.start(make_buffer(sender.spec, 64, CPU, sends=True))
    reading.start(make_buffer(reading.spec, 64, CPU, sends=False))
    reading.order(lambda: None)
    leaving.close()
    tries = iter(range(50))

    def watch():
        if next(tries, None) is None:
            raise WireBroken("nothing was heard")

    with pytest.raises(WireBroken, match="receiver 2 "):
        sender.drain(watch)
    for wire in (sender, reading):
        wire.close()


def test_whoever_comes_to_the_socket_without_a_rank_is_not_let_in():
    store, spec = group(1)
    scoped = prefixed(store, 1)
    lenders = []
    lending = threading.Thread(target=lambda: lenders.append(ipc.lend(scoped, spec, CPU)))
    lending.start()
    name = ipc._await_key(scoped, BOUND_S)
    strangers = []
    for word in (b"", (0).to_bytes(8, "little"), (2).to_bytes(8, "little"), b"GET / HTTP/1.1", None):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{name}")
        if word is not None:  # else it stays and says nothing
            stranger.send(word) if word else stranger.close()
        strangers.append(stranger)
    borrower = ipc.borrow(scoped, spec, 1, CPU)
    lending.join(BOUND_S)
    borrower.broadcast([])
    lenders[0].broadcast([ipc.shareable(16, CPU)])
    assert borrower.has_come(1)
    for stranger in strangers:
        stranger.close()


def test_who_comes_when_the_sender_has_given_up_does_not_take_it_for_another_host():
    store, spec = group(1)
    scoped = prefixed(store, 1)
    with pytest.raises(WireBroken, match="ranks \\[1\\] did not come"):
        ipc.lend(scoped, msgspec.structs.replace(spec, timeout_s=0.05), CPU)
    with pytest.raises(WireBroken, match="waits for nobody any more") as broken:
        ipc.borrow(scoped, spec, 1, CPU)
    assert not ipc.is_unavailable(str(broken.value))


def test_the_sender_hears_from_a_rank_that_cannot_come_or_read(monkeypatch):
    store, spec = group(2)  # of one engine, which may tell what its other rank says
    scoped, reasons = prefixed(store, 1), []

    def lend(use):
        try:
            use(ipc.lend(scoped, spec, CPU))
        except WireBroken as error:
            reasons.append(str(error))

    monkeypatch.setattr(ipc, "_is_ours", lambda peer: threading.current_thread() is not threading.main_thread())
    lending = threading.Thread(target=lend, args=(lambda lender: None,))
    lending.start()
    with pytest.raises(WireBroken, match="another user's"):
        ipc.borrow(scoped, spec, 2, CPU)
    lending.join(BOUND_S)
    monkeypatch.undo()

    sender, _, two = opened(2)
    monkeypatch.setattr(ipc, "_map", refuse)
    two.start(make_buffer(two.spec, 16, CPU, sends=False))
    sender.start(make_buffer(sender.spec, 16, CPU, sends=True))
    with pytest.raises(WireBroken):
        two.order(lambda: None)
    with pytest.raises(WireBroken, match="invalid resource handle") as broken:
        sender.drain(lambda: None)
    assert all(map(ipc.is_unavailable, [*reasons, str(broken.value)]))
    assert len(reasons) == 1


def test_a_receiver_reads_what_was_lent_though_the_sender_has_closed_it():
    sender, receiver = opened(1)
    buffer = make_buffer(sender.spec, 64, CPU, sends=True)
    buffer.fill_(7)
    receiver.start(make_buffer(receiver.spec, 64, CPU, sends=False))
    sender.start(buffer)
    sender.close()
    del buffer
    gc.collect()
    assert int(receiver.order(lambda: None).sum()) == 7 * 64  # and does not think that memory cannot be shared
    with pytest.raises(WireBroken, match="the sender has left"):
        receiver.drain(lambda: None)
    receiver.close()


def test_an_end_that_leaves_is_missed_though_a_forked_child_has_its_socket():
    sender, receiver = opened(1)
    kept = os.dup(sender._group._readers[0].fileno())
    receiver.start(make_buffer(receiver.spec, 64, CPU, sends=False))
    sender.close()
    tries = iter(range(50))

    def watch():
        if next(tries, None) is None:
            raise WireBroken("nothing was heard")

    with pytest.raises(WireBroken, match="the sender has left"):
        receiver.order(watch)
    receiver.close()
    os.close(kept)


def refuse(*_, **_kwargs):
    raise RuntimeError("CUDA error: invalid resource handle\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize(
    ("where", "what"), [(ipc, "_map"), (ipc.Lender, "_place"), (ipc, "_open")], ids=["receiver", "sender", "nowhere"]
)
def test_where_memory_cannot_be_shared_weights_go_through_host_memory_from_then_on(monkeypatch, caplog, where, what):
    monkeypatch.setattr(where, what, refuse)
    tensors = {f"t{i}": torch.full((900,), float(i)) for i in range(5)}
    engines = [Engine(), Engine()]

    async def run():
        async with trained(engines, tensors) as sender:
            for version in range(3):
                report = await asyncio.wait_for(asyncio.to_thread(sender.publish, version), BOUND_S)
                assert (report.receivers, report.dropped) == (2, ())
                assert [engine.version for engine in engines] == [version] * 2

    asyncio.run(run())
    assert all(torch.equal(engine.held[name], tensor) for engine in engines for name, tensor in tensors.items())
    assert [engine.backend for engine in engines] == ["gloo", "gloo"]
    told = [r.message for r in caplog.records if "through host memory" in r.message]
    assert len(told) == 1
    assert "CUDA error: invalid resource handle" in told[0]
    assert "\n" not in told[0]


def test_generators_that_come_and_go_leave_no_memory_behind():
    tensors = {f"t{i}": torch.full((900,), float(i)) for i in range(5)}

    async def run():
        async with trained([Engine()], tensors) as sender:
            await asyncio.to_thread(sender.publish, 0)
            buffers, files = [b.data_ptr() for b in sender._buffers], len(os.listdir("/proc/self/fd"))
            for version in range(1, 6):
                sender._conductor.disband("as when a generator was killed")
                report = await asyncio.wait_for(asyncio.to_thread(sender.publish, version), BOUND_S)
                assert report.receivers == 1
                assert [b.data_ptr() for b in sender._buffers] == buffers
            assert len(os.listdir("/proc/self/fd")) <= files + 4

    asyncio.run(run())
