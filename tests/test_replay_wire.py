"""Bytes on the wire: what is packed comes back, and no bytes whatever do harm."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import make_group

from asyncrl.replay import frames, messages, wire
from asyncrl.replay.seal import Damaged, digest_of, seal, unseal
from asyncrl.types import Episode, Group, Prompt


@st.composite
def groups(draw: st.DrawFn) -> Group:
    plain = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5), st.lists, max_leaves=4
    )
    shared = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
    same = draw(st.booleans())

    def episode() -> Episode:
        n = draw(st.integers(0, 6))
        prompt = shared if same else draw(st.lists(st.integers(0, 99), max_size=4))
        return Episode(
            prompt_ids=np.array(prompt, np.int32),
            token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
            logprobs=np.array(draw(st.lists(st.floats(width=32, allow_nan=False), min_size=n, max_size=n)), np.float32),
            versions=np.array(draw(st.lists(st.integers(-1, 99), min_size=n, max_size=n)), np.int32),
            loss_mask=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool),
            reward=draw(st.floats(allow_nan=False)),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            rewards=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2)),
            text=draw(st.text(max_size=8)),
            metadata=draw(st.dictionaries(st.text(max_size=3), plain, max_size=2)),
        )

    prompt = Prompt(id=draw(st.integers(0, 2**40)), prompt=draw(st.text(max_size=8)), target=draw(plain))
    return Group(
        lease_id=draw(st.integers(-1, 2**40)),
        prompt=prompt,
        episodes=[episode() for _ in range(draw(st.integers(1, 4)))],
    )


@settings(max_examples=30, deadline=None)
@given(groups())
def test_group_survives_the_wire(group: Group) -> None:
    frames = [bytes(f) for f in wire.pack_group(group)]
    back = wire.unpack_group(frames)
    assert (back.lease_id, back.prompt, len(back.episodes)) == (group.lease_id, group.prompt, len(group.episodes))
    for a, b in zip(group.episodes, back.episodes, strict=True):
        for name in ("prompt_ids", "token_ids", "logprobs", "versions", "loss_mask"):
            mine, theirs = getattr(a, name), getattr(b, name)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        for name in ("reward", "finish_reason", "rewards", "text", "metadata"):
            assert getattr(a, name) == getattr(b, name)


def test_unpacked_arrays_can_be_written() -> None:
    group = wire.unpack_group([bytes(f) for f in wire.pack_group(make_group(0, versions=[1, 2]))])
    group.episodes[0].token_ids[0] = 7
    group.episodes[0].loss_mask[0] = False
    assert group.episodes[1].token_ids[0] == 0


def test_shared_prompt_travels_once() -> None:
    frames = wire.pack_group(make_group(0, versions=[0] * 8))
    assert memoryview(frames[1]).nbytes == 8 * (3 * 13 + 3) + 2 * 4


def test_numpy_numbers_in_metadata_travel_as_numbers() -> None:
    group = make_group(0, versions=[0])
    group.episodes[0].metadata = {"score": np.float32(0.5), "row": np.arange(2)}
    assert wire.unpack_group(wire.pack_group(group)).episodes[0].metadata == {"score": 0.5, "row": [0, 1]}


def test_objects_in_metadata_are_refused_by_the_sender() -> None:
    group = make_group(0, versions=[0])
    group.episodes[0].metadata = {"tool": object()}
    with pytest.raises(ValueError, match="not plain data"):
        wire.pack_group(group)


def test_arrays_that_do_not_align_are_refused_by_the_sender() -> None:
    group = make_group(0, versions=[0])
    group.episodes[0].logprobs = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="must have one length"):
        wire.pack_group(group)


@settings(max_examples=30, deadline=None)
@given(groups(), st.data())
def test_truncated_group_is_refused(group: Group, data: st.DataObject) -> None:
    frames = [bytes(f) for f in wire.pack_group(group)]
    which = data.draw(st.sampled_from([i for i, f in enumerate(frames) if f]))
    frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    with pytest.raises(ValueError, match=r".+"):
        wire.unpack_group(frames)
    with pytest.raises(ValueError, match="a group has 2 frames"):
        wire.unpack_group(frames[:-1])


def test_unknown_schema_version_says_what_to_do() -> None:
    frame = b"ARL" + bytes([wire.SCHEMA_VERSION + 1]) + b"\x90"
    for unpack in (wire.unpack_request, wire.unpack_reply):
        with pytest.raises(ValueError, match="run the same asyncrl everywhere"):
            unpack(frame)


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000]
)
def test_hostile_sizes_allocate_nothing(claim: bytes) -> None:
    tracemalloc.start()
    try:
        for body in (claim, b"\x96\x00" + claim, b"\x96\x00\x91\x01" + claim):
            with pytest.raises(ValueError, match="malformed message"):
                wire.unpack_request(wire.PREFIX + body)
            with pytest.raises(ValueError, match=r".+"):
                wire.unpack_group([wire.PREFIX + body, b""])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_header_that_announces_more_than_came_is_refused() -> None:
    frames = [bytes(f) for f in wire.pack_group(make_group(0, versions=[0]))]
    header = wire.check_group(frames)
    lying = wire.GroupHeader(0, header.prompt_lengths, [2**30], header.text_lengths, header.rewards, header.detail)
    with pytest.raises(ValueError, match="a group's body must have"):
        wire.unpack_group([wire._pack_header(lying), *frames[1:]])


def test_long_header_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ValueError, match="a header may have"):
        wire.unpack_request(wire.PREFIX + b"\x90" * wire.MAX_HEADER_BYTES)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.lists(st.binary(max_size=20), max_size=8))
def test_random_bytes_are_a_value_error_or_a_message(noise: bytes, prefixed: bool, rest: list[bytes]) -> None:
    frame = wire.PREFIX + noise if prefixed else noise
    for read in (
        lambda: wire.unpack_request(frame),
        lambda: wire.unpack_reply(frame),
        lambda: wire.unpack_group([frame, *rest]),
    ):
        try:
            read()
        except ValueError:
            continue


@settings(max_examples=40, deadline=None)
@given(groups(), st.data())
def test_flipped_bytes_are_a_value_error_or_a_group(group: Group, data: st.DataObject) -> None:
    frames = [bytearray(bytes(f)) for f in wire.pack_group(group)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from([f for f in frames if f]))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.unpack_group(frames)
    except ValueError:
        return


@pytest.mark.parametrize(
    "body",
    [
        messages.Hello(pid=3, host="here"),
        messages.AskLease(n=4),
        messages.Drop(lease_id=3, reason="filtered", num_tokens=9, reward=1.0, length=2.0),
        messages.Heartbeat(activity={"tokens": 4.0}, held=[1, 2]),
        messages.Take(step=1, num_groups=2, version=0),
        messages.Again(),
    ],
)
def test_request_survives_the_wire(body: messages.Request) -> None:
    envelope = wire.Envelope("abc", 7, 5, "generator", 1, body)
    header, payload = unseal(wire.pack_message(envelope, [b"payload"]))
    assert wire.unpack_request(header) == envelope
    assert payload.frames == [b"payload"]


@settings(max_examples=80, deadline=None)
@given(frames=st.lists(st.binary(max_size=60) | st.binary(min_size=5000, max_size=5010), min_size=1), data=st.data())
def test_a_message_that_was_changed_on_the_way_is_noticed(frames: list[bytes], data: st.DataObject) -> None:
    digests = [digest_of(f) for f in frames[1:]]
    sealed = [frames[0] + seal(frames[0], digests), *frames[1:]]
    assert unseal(sealed) == (frames[0], (frames[1:], digests))
    which = data.draw(st.sampled_from([i for i, f in enumerate(sealed) if f]))
    changed = bytearray(sealed[which])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    cut = sealed[which][:-1]
    for others in (
        [*sealed[:which], bytes(changed), *sealed[which + 1 :]],
        [*sealed[:which], cut, *sealed[which + 1 :]],
        sealed[:which] + sealed[which + 1 :],
    ):
        with pytest.raises(Damaged, match="damaged on the way"):
            unseal(others)


@settings(max_examples=60, deadline=None)
@given(words=st.integers(2, 5000), seed=st.integers(0, 99), data=st.data())
def test_words_that_have_changed_places_are_noticed(words: int, seed: int, data: st.DataObject) -> None:
    sent = np.random.default_rng(seed).integers(0, 1 << 63, words, dtype=np.uint64)
    a, b = data.draw(st.lists(st.integers(0, words - 1), min_size=2, max_size=2, unique=True))
    came = sent.copy()
    came[[a, b]] = sent[[b, a]]
    assert digest_of(came.data) != digest_of(sent.data)


@settings(max_examples=60, deadline=None)
@given(frames_=st.lists(st.binary(max_size=40), min_size=1, max_size=9), data=st.data())
def test_joined_frames_are_what_they_were_and_what_is_not_joined_is_refused(
    frames_: list[bytes], data: st.DataObject
) -> None:
    (joined,) = frames.join([b"ARL header", *frames_])
    found = frames.split(joined)
    assert [bytes(f) for f in found] == [b"ARL header", *frames_]
    damaged = bytearray(joined)[: data.draw(st.integers(4, len(joined)))]
    damaged[data.draw(st.integers(4, len(damaged))) - 1] ^= data.draw(st.integers(0, 255))
    with suppress(ValueError):
        assert sum(len(f) for f in frames.split(bytes(damaged))) <= len(damaged)


def test_joined_arrays_are_aligned_and_a_message_of_one_frame_stays_as_it_is() -> None:
    (joined,) = frames.join([b"h", b"x" * 3, np.arange(5.0).data])
    whole = np.frombuffer(joined, np.uint8)
    starts = [np.frombuffer(f, np.uint8).__array_interface__["data"][0] for f in frames.split(whole.data)]
    assert [(s - whole.__array_interface__["data"][0]) % 8 for s in starts] == [0, 0, 0]
    assert frames.join([b"one"]) == [b"one"]
    long = [b"h", bytes(frames.JOINED_BYTES)]
    assert frames.join(long) is long
    assert frames.split(b"one") == [b"one"]
