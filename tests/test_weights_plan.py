"""The bucket plan and its messages: pure, so hypothesis drives them."""

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.weights.gather import in_sending_order
from asyncrl.weights.messages import (
    SCHEMA,
    Commit,
    Committed,
    Hello,
    TensorSpec,
    decode_to_generator,
    decode_to_trainer,
    encode,
)
from asyncrl.weights.plan import (
    ALIGNMENT,
    DTYPE_BYTES,
    buckets,
    digest,
    first_difference,
    make_plan,
    tensor_bytes,
    total_bytes,
)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), min_size=1, max_size=20)


def specs_of(drawn):
    return [TensorSpec(f"layer.{i}", dtype, shape) for i, (dtype, shape) in enumerate(drawn)]


@given(tensors, st.integers(1, 20).map(lambda n: n * ALIGNMENT))
def test_pieces_cover_every_byte_once_in_order(drawn, bucket_bytes):
    plan = make_plan(specs_of(drawn), bucket_bytes, 2)
    pieces = [piece for bucket in buckets(plan) for piece in bucket.pieces]
    covered = [0] * len(plan.tensors)
    order = []
    for piece in pieces:
        assert piece.start == covered[piece.tensor]
        covered[piece.tensor] += piece.nbytes
        order.append(piece.tensor)
    assert order == sorted(order)
    assert set(order) == set(range(len(plan.tensors)))
    assert covered == [tensor_bytes(spec) for spec in plan.tensors]
    assert sum(covered) == total_bytes(plan)


@given(tensors, st.integers(1, 20).map(lambda n: n * ALIGNMENT))
def test_pieces_lie_aligned_and_apart_within_a_bucket(drawn, bucket_bytes):
    plan = make_plan(specs_of(drawn), bucket_bytes, 2)
    for bucket in buckets(plan):
        assert ALIGNMENT <= bucket.nbytes <= bucket_bytes
        assert bucket.nbytes % ALIGNMENT == 0
        end = 0
        for piece in bucket.pieces:
            assert piece.offset >= end
            assert piece.offset % ALIGNMENT == 0
            end = piece.offset + piece.nbytes
        assert end <= bucket.nbytes


@given(tensors, st.integers(1, 20).map(lambda n: n * ALIGNMENT))
def test_a_tensor_that_fits_in_a_bucket_is_never_split(drawn, bucket_bytes):
    plan = make_plan(specs_of(drawn), bucket_bytes, 2)
    parts = [piece.tensor for bucket in buckets(plan) for piece in bucket.pieces]
    for index, spec in enumerate(plan.tensors):
        assert parts.count(index) == 1 or tensor_bytes(spec) > bucket_bytes


def test_small_tensors_share_a_bucket_and_a_large_one_spans_several():
    specs = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (2,)), TensorSpec("c", "uint8", (150,))]
    cut = buckets(make_plan(specs, 64, 2))
    assert [[(p.tensor, p.start, p.offset, p.nbytes) for p in bucket.pieces] for bucket in cut] == [
        [(0, 0, 0, 8), (1, 0, 16, 8), (2, 0, 32, 32)],
        [(2, 32, 0, 64)],
        [(2, 96, 0, 54)],
    ]
    assert [bucket.nbytes for bucket in cut] == [64, 64, 64]


def test_the_ends_of_a_long_plan_are_small_and_a_short_one_has_none():
    """What the first bucket holds delays the wire, and what the last holds delays the commit."""
    specs = [TensorSpec(f"layer.{i}", "uint8", (32,)) for i in range(60)]
    sizes = [bucket.nbytes for bucket in buckets(make_plan(specs, 512, 2))]
    assert sizes == [64, 512, 512, 512, 64, 192, 64]
    assert [bucket.nbytes for bucket in buckets(make_plan(specs[:40], 512, 2))] == [512, 512, 256]


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30))
def test_large_tensors_are_sent_neither_first_nor_last(sizes):
    named = [(str(i), torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    ordered = in_sending_order(named)
    assert sorted(ordered, key=lambda item: int(item[0])) == named
    large = [size * 32 > sum(sizes) for size in sizes]
    small = [int(name) for name, _ in ordered if not large[int(name)]]
    assert small == sorted(small)
    if any(large) and len(small) > 1:
        assert not large[int(ordered[0][0])]
        assert not large[int(ordered[-1][0])]


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "num_buffers", "words"),
    [
        ([], 64, 2, "no tensors"),
        ([TensorSpec("a", "float32", ())], 0, 2, "bucket_bytes"),
        ([TensorSpec("a", "float32", ())], 24, 2, "bucket_bytes"),
        ([TensorSpec("a", "float32", ())], 64, 0, "num_buffers"),
        ([TensorSpec("a", "quint4x2", ())], 64, 2, "quint4x2"),
        ([TensorSpec("a", "float32", ()), TensorSpec("a", "float32", ())], 64, 2, "'a'"),
        ([TensorSpec("a", "float32", ()), TensorSpec("b", "float32", (), ("a",))], 64, 2, "'a'"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(specs, bucket_bytes, num_buffers, words):
    with pytest.raises(ValueError, match=words):
        make_plan(specs, bucket_bytes, num_buffers)


@given(tensors, st.data())
def test_order_changes_the_digest(drawn, data):
    specs = specs_of(drawn)
    shuffled = data.draw(st.permutations(specs))
    one, other = make_plan(specs, 64, 2), make_plan(shuffled, 64, 2)
    assert (one.digest == other.digest) == (specs == shuffled)
    if specs != shuffled:
        assert "tensor" in first_difference(one, other)


def test_sizes_change_the_digest_and_the_wire_does_not():
    specs = [TensorSpec("a", "float32", (3,))]
    plan = make_plan(specs, 64, 2)
    assert len({plan.digest, make_plan(specs, 128, 2).digest, make_plan(specs, 64, 3).digest}) == 3
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan))
    assert digest(again) == plan.digest
    assert buckets(again) == buckets(plan)


def test_control_messages_round_trip():
    hello = Hello(index=3, incarnation="x", num_ranks=2, version=-1, attempt=0)
    commit = Commit(version=4, attempt=9, checksums=[-(2**63), 2**63 - 1])
    assert decode_to_trainer(encode(hello)) == hello
    assert decode_to_generator(encode(commit)) == commit


@given(st.binary(max_size=60))
def test_malformed_control_messages_are_value_errors(junk):
    assume(junk != SCHEMA)
    frames = encode(Committed(version=1, attempt=1, pause_s=0.0, wire_s=0.0, load_s=0.0))
    for bad in ([junk], [junk, frames[1]], [SCHEMA, frames[1][:-1]], [SCHEMA, frames[1], junk]):
        with pytest.raises(ValueError, match=r"malformed|expected two frames"):
            decode_to_trainer(bad)
    with pytest.raises(ValueError, match="malformed"):
        decode_to_generator(frames)


def test_whoever_cuts_otherwise_has_another_digest(monkeypatch):
    specs = [TensorSpec(f"t{i}", "uint8", (64,)) for i in range(40)]
    plan = make_plan(specs, 512, 2)
    monkeypatch.setattr("asyncrl.weights.plan.FIRST", 1 / 2)
    assert digest(plan) != plan.digest
