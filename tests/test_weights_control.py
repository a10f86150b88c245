"""The trainer's control socket alone: who is heard, who is refused, and how an end is noticed."""

import dataclasses

import msgspec
import pytest
import zmq

from asyncrl.replay.keys import load_keys, new_keys, secure_client
from asyncrl.weights.control import Control, is_loopback
from asyncrl.weights.members import Gone, Members
from asyncrl.weights.messages import SCHEMA, Discard, Failed, Hello, Ready, decode_to_generator, encode

HELLO = Hello(index=1, incarnation="a", num_ranks=1, version=-1, attempt=0)
WAIT_S = 20.0


@pytest.fixture
def peers():
    context = zmq.Context()
    yield context
    context.destroy(0)


def dealer(context, address, name, keys=None):
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, name.encode())
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        secure_client(socket, keys)
    socket.connect(address)
    return socket


@pytest.fixture
def control():
    made = Control("tcp://127.0.0.1:*", timeout_s=10.0)
    yield made
    made.close()


def test_a_peer_is_heard_and_answered_and_its_end_is_noticed(control, peers):
    socket = dealer(peers, control.address, "1-a")
    socket.send_multipart(encode(HELLO))
    assert control.next(WAIT_S)[:2] == ("1-a", HELLO)
    control.send("1-a", Discard(version=3, reason="test"))
    assert decode_to_generator(socket.recv_multipart()) == Discard(version=3, reason="test")
    socket.close(0)
    peer, event, _ = control.next(WAIT_S)
    assert (peer, type(event)) == ("1-a", Gone)


def test_junk_is_refused_and_the_next_message_is_heard(control, peers):
    socket = dealer(peers, control.address, "1-a")
    for junk in ([b"x"], [SCHEMA, b"\xc1"], [b"asyncrl-weights-0", encode(HELLO)[1]], [b""] * 9):
        socket.send_multipart(junk)
    socket.send_multipart(encode(HELLO))
    assert control.next(WAIT_S)[:2] == ("1-a", HELLO)


def test_a_peer_that_is_not_there_is_gone(control):
    control.send("nobody", Discard(version=0, reason="test"))
    peer, event, _ = control.next(WAIT_S)
    assert (peer, type(event)) == ("nobody", Gone)


def test_a_peer_that_came_back_under_its_name_is_not_taken_for_its_former_self(control, peers):
    first = dealer(peers, control.address, "1-a")
    first.send_multipart(encode(HELLO))
    assert control.next(WAIT_S)[:2] == ("1-a", HELLO)
    second = dealer(peers, control.address, "1-a")
    second.send_multipart(encode(msgspec.structs.replace(HELLO, version=5, attempt=1)))
    members = Members()
    members.begin_attempt()
    members.apply(*control.next(WAIT_S))
    first.close(0)
    second.send_multipart(encode(HELLO))
    while (event := control.next(WAIT_S))[:2] != ("1-a", HELLO):
        members.apply(*event)
    assert [m.version for m in members.behind(None)] == [5]


def test_without_keys_only_this_machine_can_be_served():
    assert is_loopback("tcp://127.0.0.1:*")
    assert is_loopback("tcp://[::1]:5")
    assert is_loopback("ipc:///tmp/x")
    for address in ("tcp://0.0.0.0:*", "tcp://*:7000", "tcp://10.1.2.3:7000"):
        with pytest.raises(ValueError, match="CURVE keys"):
            Control(address, timeout_s=1.0)


def test_an_address_that_is_taken_is_named_with_its_key():
    control = Control("tcp://127.0.0.1:*", timeout_s=1.0)
    try:
        with pytest.raises(ValueError, match=rf"weights.bind: the trainer cannot listen on {control.address}"):
            Control(control.address, timeout_s=1.0)
    finally:
        control.close()


def test_with_keys_only_those_on_the_list_are_heard(peers, tmp_path):
    new_keys(tmp_path / "ours")
    new_keys(tmp_path / "theirs")
    control = Control("tcp://127.0.0.1:*", timeout_s=10.0, curve=load_keys(tmp_path / "ours", "server"))
    right, wrong = (load_keys(tmp_path / folder, "client") for folder in ("ours", "theirs"))
    foreign = dataclasses.replace(wrong, server=right.server)  # knows our server, is not on its list
    try:
        keys = {"bare": None, "wrong": wrong, "foreign": foreign, "right": right}
        sockets = [dealer(peers, control.address, name, key) for name, key in keys.items()]
        for socket in sockets:
            socket.send_multipart(encode(HELLO))
        assert control.next(WAIT_S)[:2] == ("right", HELLO)
        assert control.next(0.5) is None
    finally:
        control.close()


def test_members_keep_what_each_answered_and_forget_the_gone():
    members = Members()
    ready = Ready(version=1, attempt=0, digest="d")
    members.apply("1-a", HELLO, 1.0)
    members.apply("1-a", ready, 2.0)
    members.apply("2-b", ready, 2.0)  # never said hello
    assert members.replies == {"1-a": ready}
    members.begin_attempt()
    members.apply("1-a", msgspec.structs.replace(HELLO, version=1, attempt=1), 3.0)
    assert members.by_key["1-a"].heard == 3.0
    assert members.behind(1) == []
    assert [m.index for m in members.behind(2)] == [1]
    members.apply("1-a", Gone("connection lost"), 4.0)
    assert members.behind(2) == []
    assert isinstance(members.replies["1-a"], Gone)


def test_answers_to_an_earlier_attempt_are_passed_over():
    members = Members(100)
    members.apply("1-a", HELLO, 1.0)
    earlier, now = members.begin_attempt(), members.begin_attempt()
    assert (earlier, now) == (101, 102)
    members.apply("1-a", Ready(version=1, attempt=earlier, digest="d"), 2.0)
    assert members.replies == {}
    answer = Ready(version=1, attempt=now, digest="d")
    members.apply("1-a", answer, 3.0)
    members.apply("1-a", Failed(version=1, attempt=earlier, stage="wire", reason="late"), 4.0)
    assert members.replies == {"1-a": answer}


def test_a_version_that_a_former_trainer_published_is_not_taken_for_ours():
    members = Members(100)
    members.apply("1-a", msgspec.structs.replace(HELLO, version=7, attempt=99), 1.0)
    members.begin_attempt()
    members.apply("2-b", msgspec.structs.replace(HELLO, version=7, attempt=101), 1.0)
    members.apply("3-c", msgspec.structs.replace(HELLO, version=7, attempt=102), 1.0)  # its trainer's clock was ahead
    assert [m.key for m in members.behind(7)] == ["1-a", "3-c"]
