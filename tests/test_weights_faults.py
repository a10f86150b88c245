"""Any faults in any order: a sender and two generators in one process, over real sockets, gloo and ipc.

Whatever fails, an engine holds what it says it serves, the sender's report is true, and the next publish without a
fault reaches everybody.
"""

import asyncio
import itertools
import time

import msgspec
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncrl.config import WeightsConfig
from asyncrl.weights.follower import follow
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.store import WireBroken

CONFIG = WeightsConfig(bucket_bytes=4096, timeout_s=1.5)
BOUND_S = 20.0
SIZE = 1024
FAULTS = ("no", "join", "before the wire", "load", "corrupt", "behind the wire", "commit", "late")
NAMES = [f"t{i}" for i in range(5)]


class Engine:
    """Holds tensors. `faults` are what befalls it in one sync after the other, then nothing does."""

    num_weight_ranks = 1

    def __init__(self, faults, *, head_start):
        self.version, self.held = -1, {}
        self._faults, self._head_start = list(faults), head_start
        self._fault, self._staged, self._receiver = "no", {}, Receiver()

    async def join_weights(self, spec):
        if self._take() == "join":
            raise OSError("no memory")
        await asyncio.to_thread(self._receiver.join, spec, 0, "cpu", head_start=self._head_start)

    async def receive_weights(self, plan):
        fault, self._staged = self._take(), {}
        if fault == "before the wire":
            self._receiver.leave()
        sums = await asyncio.to_thread(self._receiver.receive, plan, self._load)
        if fault == "behind the wire":
            raise WireBroken("it broke when all had come")
        return sums

    async def commit_weights(self, version):
        if self._fault == "late":
            await asyncio.sleep(CONFIG.timeout_s * 1.2)
        if self._fault == "commit":
            self._fault = "no"
            raise OSError("no memory")
        self.version, self.held, self._fault = version, self._staged, "no"

    async def discard_weights(self):
        self._staged, self._fault = {}, "no"

    def activity(self):
        return {"pause_s": 0.0}

    def close(self):
        self._receiver.leave()

    def heal(self):
        self._faults, self._fault = [], "no"

    def _take(self):
        """The fault of this sync: the same in all its calls until it has struck."""
        if self._fault == "no" and self._faults:
            self._fault = self._faults.pop(0)
        fault = self._fault
        if fault in ("join", "before the wire", "behind the wire"):
            self._fault = "no"
        return fault

    def _load(self, tensors):
        fault = self._fault
        if fault in ("load", "corrupt"):
            self._fault = "no"
        if fault == "load":
            raise OSError("no memory")
        for name, tensor in tensors:
            if fault == "corrupt":
                tensor[7] += 1
            self._staged[name] = tensor.clone()


def values(version):
    return {name: torch.full((SIZE,), 1000.0 * version + i) for i, name in enumerate(NAMES)}


class World:
    def __init__(self, faults, head_start, backend):
        self._config = msgspec.structs.replace(CONFIG, backend=backend)
        self.version, self._count, self._lives = -1, itertools.count(), {}
        self.sender = WeightSender(
            tensors=lambda: values(self.version).items(), rank=0, config=self._config, device="cpu"
        )
        self.engines = [Engine(own, head_start=head_start) for own in faults]
        self.following = [self._follow(index) for index in range(len(faults))]

    def _follow(self, index):
        life = self._lives[index] = f"life-{next(self._count)}"
        return asyncio.ensure_future(
            follow(self.sender.address, self.engines[index], index=index, incarnation=life, config=self._config,
                   on_version=lambda version: None)
        )  # fmt: skip

    async def everybody_is_there(self):
        """Whoever gave up after three failures is started again; all have said hello."""
        deadline, members = time.monotonic() + BOUND_S, self.sender._conductor.members.by_key
        while sorted(m.incarnation for m in members.values()) != sorted(self._lives.values()):
            assert time.monotonic() < deadline
            for index, task in enumerate(self.following):
                if task.done():
                    assert "in a row" in str(task.exception())
                    self.following[index] = self._follow(index)
            await asyncio.sleep(0.02)
            self.sender.newcomers()

    async def publish(self):
        self.version += 1
        report = await asyncio.wait_for(asyncio.to_thread(self.sender.publish, self.version), BOUND_S)
        dropped = {d.index for d in report.dropped}
        for index, engine in enumerate(self.engines):
            held = values(engine.version) if engine.version >= 0 else {}
            assert engine.held.keys() == held.keys()
            assert all(torch.equal(engine.held[name], held[name]) for name in held)
            if index not in dropped:
                assert engine.version == self.version
        assert report.receivers == len(self.engines) - len(dropped)

    async def close(self):
        for task in self.following:
            task.cancel()
        await asyncio.gather(*self.following, return_exceptions=True)
        for engine in self.engines:
            engine.close()
        await asyncio.to_thread(self.sender.close)


async def live(faults, head_start, backend):
    world = World(faults, head_start, backend)
    try:
        for _ in range(3):
            await world.everybody_is_there()
            await world.publish()
        for engine in world.engines:
            engine.heal()
        await world.everybody_is_there()
        await world.publish()
        assert [engine.version for engine in world.engines] == [world.version] * len(faults)
    finally:
        await world.close()


some = st.lists(st.sampled_from(FAULTS), max_size=5)


@settings(max_examples=10, derandomize=True, phases=[Phase.generate], deadline=None)
@given(st.lists(some, min_size=1, max_size=2), st.booleans(), st.sampled_from(["gloo", "ipc"]))
def test_whatever_fails_nobody_serves_what_it_does_not_hold_and_all_come_back(faults, head_start, backend):
    asyncio.run(live(faults, head_start, backend))
