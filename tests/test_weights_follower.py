"""The generator's end of the control plane, against a trainer that this test plays: which plans it agrees to."""

import asyncio

import msgspec
import pytest
import zmq.asyncio
from weights_peers import Holder

from asyncrl.config import WeightsConfig
from asyncrl.types import EngineDead
from asyncrl.weights import follower
from asyncrl.weights.follower import follow
from asyncrl.weights.messages import (
    Commit,
    Discard,
    Failed,
    Go,
    Hello,
    JoinSpec,
    Prepare,
    Ready,
    TensorSpec,
    decode_to_trainer,
    encode,
)
from asyncrl.weights.plan import make_plan

PLAN = make_plan([TensorSpec("a", "float32", (4,))], 64, 2)
SPEC = JoinSpec(host="127.0.0.1", port=1, generation=1, first_rank=1, world_size=2, backend="gloo", timeout_s=5.0)
BOUND_S = 20.0


class Trainer:
    """A ROUTER with one generator at it."""

    def __init__(self, address="tcp://127.0.0.1:*"):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peer = b""

    async def ask(self, message):
        """The answer to a message; hellos are passed over."""
        await self.tell(message)
        while isinstance(answer := await self.hear(), Hello):
            pass
        return answer

    async def tell(self, *messages):
        if not self._peer:
            await self.hear()
        for message in messages:
            await self.socket.send_multipart([self._peer, *encode(message)])

    async def hear(self):
        async with asyncio.timeout(BOUND_S):
            self._peer, *frames = await self.socket.recv_multipart()
        return decode_to_trainer(frames)

    def close(self):
        self._context.destroy(0)


class Instant(Holder):
    """An engine into which all weights have come as soon as it is asked."""

    async def join_weights(self, spec):
        """No group: the trainer that this test plays sends no bytes."""

    async def receive_weights(self, plan):
        return [7]


def play(scenario, timeout_s=5.0):
    """Runs `scenario(trainer, engine)` with an engine that follows the trainer; raises what ends the follower."""

    async def run():
        trainer, engine = Trainer(), Instant({}, "cpu")
        config = WeightsConfig(timeout_s=timeout_s)
        following = asyncio.create_task(
            follow(trainer.address, engine, index=0, incarnation="x", config=config, on_version=print)
        )
        playing = asyncio.create_task(scenario(trainer, engine))
        try:
            await asyncio.wait({following, playing}, return_when=asyncio.FIRST_COMPLETED)
            return (following if following.done() else playing).result()
        finally:
            for task in (following, playing):
                task.cancel()
            await asyncio.gather(following, playing, return_exceptions=True)
            trainer.close()

    return asyncio.run(run())


def answers(*messages):
    """What a generator answers to these, one after the other."""

    async def scenario(trainer, engine):
        return [await trainer.ask(message) for message in messages]

    return play(scenario)


def prepare(version, plan, digest=PLAN.digest):
    return Prepare(version=version, attempt=version + 1, spec=SPEC, digest=digest, plan=plan)


def test_a_plan_is_sent_once_and_named_from_then_on():
    assert answers(prepare(0, PLAN), prepare(1, None)) == [
        Ready(version=0, attempt=1, digest=PLAN.digest),
        Ready(version=1, attempt=2, digest=PLAN.digest),
    ]


def test_no_message_is_lost_that_comes_while_it_says_hello(monkeypatch):
    monkeypatch.setattr(follower, "HELLO_S", 0.0003)
    versions = range(1500)
    heard = answers(prepare(0, PLAN), *(prepare(version, None) for version in versions[1:]))
    assert [answer.version for answer in heard] == list(versions)


@pytest.mark.parametrize("first", [[], [prepare(0, PLAN)]], ids=["no plan yet", "another plan"])
def test_a_plan_that_was_never_sent_is_refused(first):
    *_, last = answers(*first, prepare(1, None, digest="another"))
    assert isinstance(last, Failed)
    assert (last.version, last.stage) == (1, "prepare")
    assert "has not sent" in last.reason


def test_a_plan_that_is_not_what_it_says_is_refused_and_not_remembered():
    torn = msgspec.structs.replace(PLAN, bucket_bytes=128)
    refused, named = answers(prepare(0, torn), prepare(0, None))
    assert isinstance(refused, Failed)
    assert "digest" in refused.reason
    assert isinstance(named, Failed)


def go(version, attempt):
    return Go(version=version, attempt=attempt, generation=SPEC.generation, digest=PLAN.digest)


def commit(version, attempt):
    return Commit(version=version, attempt=attempt, checksums=[7])


def test_a_commit_of_another_attempt_serves_nothing_and_is_answered_at_once():
    async def scenario(trainer, engine):
        await trainer.ask(prepare(0, PLAN))
        await trainer.tell(go(0, attempt=2))
        stale = await trainer.ask(commit(0, attempt=1))  # with the checksums of the same weights
        assert (stale.stage, stale.attempt, engine.version) == ("commit", 1, -1)
        served = await trainer.ask(commit(0, attempt=2))
        assert (served.attempt, engine.version) == (2, 0)
        again = await trainer.ask(commit(1, attempt=2))
        assert (again.stage, engine.version) == ("commit", 0)

    play(scenario)


def test_what_is_discarded_twice_failed_once():
    async def scenario(trainer, engine):
        for attempt in (5, 7, 9):
            await trainer.ask(prepare(0, PLAN))
            await trainer.tell(go(0, attempt=attempt), Discard(version=0, reason="test"), Discard(version=0, reason=""))
        await trainer.ask(prepare(0, PLAN))  # it has not given up, though it was told six times

    with pytest.raises(RuntimeError, match="3 weight syncs failed in a row"):
        play(scenario)


def test_a_trainer_that_is_gone_between_broadcast_and_commit_is_not_waited_for():
    async def scenario(trainer, engine):
        await trainer.ask(prepare(0, PLAN))
        await trainer.tell(go(0, attempt=2))
        assert (await trainer.ask(prepare(0, None))).attempt == 1  # the go came
        await trainer.tell(go(0, attempt=3))
        trainer.close()
        successor = Trainer(trainer.address)
        try:
            hello = await successor.hear()
            assert (hello.version, hello.attempt, engine.discarded) == (-1, 0, 1)
        finally:
            successor.close()

    play(scenario, timeout_s=100.0)


class InPlace(Instant):
    """An engine that loads into the weights it serves, and never gets all."""

    def __init__(self, error):
        super().__init__({}, "cpu")
        self._error, self.receiving = error, asyncio.Event()

    async def receive_weights(self, plan):
        self.receiving.set()
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    async def discard_weights(self):
        self.discarded += 1
        raise EngineDead("the old weights are overwritten")


@pytest.mark.parametrize("error", [None, EngineDead("no answer")])
def test_what_ends_a_follower_amid_a_sync_is_what_it_raises(error):
    async def run():
        trainer, engine = Trainer(), InPlace(error)
        config = WeightsConfig(timeout_s=5.0)
        following = asyncio.create_task(
            follow(trainer.address, engine, index=0, incarnation="x", config=config, on_version=print)
        )
        await trainer.ask(prepare(0, PLAN))
        await trainer.tell(Go(version=0, attempt=2, generation=1, digest=PLAN.digest))
        await engine.receiving.wait()
        if error is None:
            following.cancel()
        (ended,) = await asyncio.gather(following, return_exceptions=True)
        trainer.close()
        return ended, engine.discarded

    ended, discarded = asyncio.run(asyncio.wait_for(run(), BOUND_S))
    if error is None:
        assert (type(ended), discarded) == (asyncio.CancelledError, 1)
    else:
        assert (ended, discarded) == (error, 0), "a dead engine has nothing to go back to"
