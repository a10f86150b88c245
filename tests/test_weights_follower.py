"""The generator's end of the control plane, against a trainer that this test plays: which plans it agrees to."""

import asyncio

import msgspec
import pytest
import zmq.asyncio
from weights_peers import Holder

from asyncrl.config import WeightsConfig
from asyncrl.weights import follower
from asyncrl.weights.follower import follow
from asyncrl.weights.messages import Failed, Hello, JoinSpec, Prepare, Ready, TensorSpec, decode_to_trainer, encode
from asyncrl.weights.plan import make_plan

PLAN = make_plan([TensorSpec("a", "float32", (4,))], 64, 2)
SPEC = JoinSpec(host="127.0.0.1", port=1, generation=1, first_rank=1, world_size=2, backend="gloo", timeout_s=5.0)
BOUND_S = 20.0


class Trainer:
    """A ROUTER with one generator at it."""

    def __init__(self):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._peer = b""

    async def ask(self, message):
        """The answer to a message; hellos are passed over."""
        if not self._peer:
            await self._hear()
        await self.socket.send_multipart([self._peer, *encode(message)])
        while isinstance(answer := await self._hear(), Hello):
            pass
        return answer

    async def _hear(self):
        async with asyncio.timeout(BOUND_S):
            self._peer, *frames = await self.socket.recv_multipart()
        return decode_to_trainer(frames)

    def close(self):
        self._context.destroy(0)


def answers(*messages):
    """What a generator answers to these, one after the other."""

    async def scenario():
        trainer = Trainer()
        config = WeightsConfig(timeout_s=5.0)
        following = asyncio.create_task(
            follow(trainer.address, Holder({}, "cpu"), index=0, incarnation="x", config=config, on_version=print)
        )
        try:
            return [await trainer.ask(message) for message in messages]
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            trainer.close()

    return asyncio.run(scenario())


def prepare(version, plan, digest=PLAN.digest):
    return Prepare(version=version, spec=SPEC, digest=digest, plan=plan)


def test_a_plan_is_sent_once_and_named_from_then_on():
    assert answers(prepare(0, PLAN), prepare(1, None)) == [
        Ready(version=0, digest=PLAN.digest),
        Ready(version=1, digest=PLAN.digest),
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
