"""The sender against a generator that this test plays, message by message."""

import threading
import time

import pytest
import torch
import zmq

from asyncrl.config import WeightsConfig
from asyncrl.weights.messages import (
    Commit,
    Committed,
    Discard,
    Failed,
    Go,
    Hello,
    Prepare,
    Ready,
    decode_to_generator,
    encode,
)
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender

BOUND_S = 20.0
CONFIG = WeightsConfig(timeout_s=8.0)


class Generator:
    """One peer of a sender, and the publish that runs meanwhile."""

    def __init__(self):
        tensors = {"a": torch.arange(1000, dtype=torch.float32)}
        self.sender = WeightSender(tensors=tensors.items, rank=0, config=CONFIG, device="cpu")
        self._context, self._receiver = zmq.Context(), Receiver()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"0-x")
        self._socket.setsockopt(zmq.RCVTIMEO, int(BOUND_S * 1000))
        self._socket.connect(self.sender.address)
        self.report = None
        self.hello()

    def hello(self, version=-1, attempt=0):
        self.say(Hello(index=0, incarnation="x", num_ranks=1, version=version, attempt=attempt))

    def say(self, message):
        self._socket.send_multipart(encode(message))

    def hear(self, kind):
        message = decode_to_generator(self._socket.recv_multipart())
        assert isinstance(message, kind), message
        return message

    def begin(self, version):
        deadline = time.monotonic() + BOUND_S
        while not self.sender.newcomers():
            assert time.monotonic() < deadline
        self._thread = threading.Thread(target=self._publish, args=(version,), daemon=True)
        self._thread.start()

    def end(self):
        """What the publish reported."""
        self._thread.join(BOUND_S)
        return self.report

    def prepare(self):
        """Until it is told to go: the order to prepare, and that to go."""
        order = self.hear(Prepare)
        self.ready(order)
        return order, self.hear(Go)

    def ready(self, order):
        self.say(Ready(version=order.version, attempt=order.attempt, digest=order.digest))

    def receive(self, order):
        self._receiver.join(order.spec, 0, "cpu")
        return self._receiver.receive(order.plan or self._plan(order), lambda tensors: None)

    def commit(self):
        order = self.hear(Commit)
        self.say(Committed(version=order.version, attempt=order.attempt, pause_s=0.0, wire_s=0.0, load_s=0.0))

    def fail(self, order, stage, attempt=None):
        self.say(Failed(version=order.version, attempt=attempt or order.attempt, stage=stage, reason="test"))

    def close(self):
        self._receiver.leave()
        self._context.destroy(0)
        self.end()
        self.sender.close()

    def _plan(self, order):
        assert self.sender._plan.digest == order.digest
        return self.sender._plan

    def _publish(self, version):
        self.report = self.sender.publish(version)


@pytest.fixture
def generator():
    made = Generator()
    yield made
    made.close()


def test_a_late_answer_to_an_earlier_attempt_of_the_same_version_costs_nothing(generator):
    generator.begin(0)
    first = generator.hear(Prepare)
    generator.fail(first, "prepare")
    generator.hear(Discard)
    assert generator.end().receivers == 0
    generator.hello()
    generator.begin(0)
    order = generator.hear(Prepare)
    generator.fail(first, "wire")
    generator.ready(order)
    go = generator.hear(Go)
    generator.fail(go, "wire", attempt=order.attempt)
    sums = generator.receive(order)
    assert generator.hear(Commit).checksums == sums
    generator.say(Committed(version=0, attempt=order.attempt, pause_s=0.0, wire_s=0.0, load_s=0.0))
    generator.say(Committed(version=0, attempt=go.attempt, pause_s=0.0, wire_s=0.0, load_s=0.0))
    report = generator.end()
    assert (report.receivers, report.dropped) == (1, ())


def test_one_that_failed_on_a_wire_that_held_is_prepared_for_a_new_group(generator):
    generator.begin(0)
    order, go = generator.prepare()
    generator.receive(order)
    generator.hear(Commit)
    generator.fail(go, "wire")
    again, _ = generator.prepare()
    assert again.spec.generation == order.spec.generation + 1
    generator.receive(again)
    generator.commit()
    assert generator.end().receivers == 1


def test_one_that_a_former_trainer_brought_to_this_version_gets_ours(generator):
    generator.hello(version=3, attempt=1)
    generator.begin(3)
    order, _ = generator.prepare()
    generator.receive(order)
    generator.commit()
    assert generator.end().receivers == 1
