"""Loading by learnt copies equals loading by the model's own code, and is refused where it could not be."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asyncrl.generation.copies import Copies, overlap

Named = list[tuple[str, Tensor]]
WIDTH, ROWS, PADDED, HEADS = 8, 10, 12, 4


class Toy(nn.Module):
    """Loads as an engine does: a padded embedding, fused q/k/v, the second of two column shards, stacked experts."""

    def __init__(self, *, twist: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(PADDED, WIDTH, dtype=torch.bfloat16))
        self.qkv = nn.Parameter(torch.empty(3 * HEADS, WIDTH, dtype=torch.bfloat16))
        self.out = nn.Parameter(torch.empty(WIDTH, HEADS, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.empty(2, WIDTH, HEADS, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("scale", torch.empty(1))
        self.calls = 0
        self._twist = twist

    @torch.no_grad()
    def load_weights(self, tensors: Named) -> set[str]:
        self.calls += 1
        return {self._load_one(name, tensor) for name, tensor in tensors} - {""}

    def _load_one(self, name: str, tensor: Tensor) -> str:
        match name.split("."):
            case ["embed"]:
                self.embed[:ROWS].data.copy_(tensor)
                self.embed[ROWS:].data.fill_(0)
            case ["q" | "k" | "v" as part]:
                self.qkv.data.narrow(0, "qkv".index(part) * HEADS, HEADS).copy_(tensor)
                return "qkv"
            case ["out"]:
                self.out.data.copy_(self._twist(tensor).narrow(1, HEADS, HEADS))
            case ["experts", index]:
                self.experts[int(index)].copy_(tensor.t())
                return "experts"
            case ["norm"]:
                self.norm.data.copy_(tensor)  # from bfloat16 to float32
            case ["scale"]:
                self.scale.copy_(tensor.view(self.scale.shape))
            case ["rotary"]:
                return ""
            case _:
                raise KeyError(name)
        return name


SHAPES = {
    "embed": (ROWS, WIDTH), "q": (HEADS, WIDTH), "k": (HEADS, WIDTH), "v": (HEADS, WIDTH), "out": (WIDTH, 2 * HEADS),
    "experts.0": (HEADS, WIDTH), "experts.1": (HEADS, WIDTH), "norm": (WIDTH,), "scale": (), "rotary": (3,),
}  # fmt: skip


def weights(seed: int, *, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Named:
    """Random tensors, one after the other in one buffer as they come off the wire."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    parts = buffer.split(sizes)
    return [(name, part.view(shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)]


def load(copies: Copies, tensors: Named, *, bucket: int = 4) -> str:
    """One whole load; returns how it was made."""
    copies.begin()
    for part in cut(tensors, bucket):
        copies.load(part)
    copies.finish()
    return copies.last


def cut(tensors: Named, size: int) -> list[Named]:
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]


def assert_loaded(model: Toy, tensors: Named) -> None:
    """`model` holds, bit for bit, what its own code makes of these tensors."""
    expected = Toy(twist=model._twist)
    expected.load_weights(tensors)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def learnt(model: Toy | None = None) -> tuple[Toy, Copies]:
    model = model or Toy()
    copies = Copies(model, model.load_weights)
    assert load(copies, weights(0)) == "learnt"
    assert_loaded(model, weights(0))
    return model, copies


@pytest.mark.parametrize("bucket", [1, 3, 20])
def test_a_repeated_load_equals_the_models_own_and_runs_none_of_its_code(bucket):
    model, copies = learnt()
    calls = model.calls
    assert load(copies, weights(1), bucket=bucket) == "repeated"
    assert model.calls == calls
    assert_loaded(model, weights(1))


def test_a_bucket_names_the_parameters_it_wrote_into_however_it_was_loaded():
    model, copies = learnt()
    copies.begin()
    for bucket in cut(weights(1), 3):
        assert copies.load(bucket) == model.load_weights(bucket)


def test_it_learns_in_inference_mode_too():
    model = Toy()
    copies = Copies(model, model.load_weights)
    with torch.inference_mode():
        assert load(copies, weights(0)) == "learnt"
        assert load(copies, weights(1)) == "repeated"
    assert_loaded(model, weights(1))


def test_padding_that_was_overwritten_is_padding_again():
    model, copies = learnt()
    model.embed.data.fill_(7)
    assert load(copies, weights(1)) == "repeated"
    assert_loaded(model, weights(1))


TWISTS = {
    "aten.mul.Tensor": lambda t: t * 2,
    "aten._to_copy.default": lambda t: t.to(torch.float64),
    "aten.clone.default": lambda t: t.t().contiguous().t(),
    "aten.add_.Tensor": lambda t: t.add_(0),
    "aten.copy_.default": lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t),
    "aten._local_scalar_dense.default": lambda t: t[: int(t[0, 0].item() * 0) or None],
    "reinterpreted": lambda t: t.view(torch.float16),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operation", TWISTS)
def test_a_load_that_does_more_than_copy_is_never_repeated_and_the_log_says_why_once(operation, inference, caplog):
    caplog.set_level(logging.INFO)
    model = Toy(twist=TWISTS[operation])
    copies = Copies(model, model.load_weights)
    with torch.inference_mode(inference):
        for seed in range(3):
            assert load(copies, weights(seed)) == "model"
            assert_loaded(model, weights(seed))
    (message,) = [record.getMessage() for record in caplog.records]
    assert operation in message or inference  # which sees contiguous() and to() whole


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("derive", [lambda p: p.float(), lambda p: p.t().contiguous(), lambda p: p.max()])
def test_a_load_that_derives_something_from_a_parameter_is_refused(derive, inference):
    class Derives(Toy):
        def load_weights(self, tensors: Named) -> set[str]:
            loaded = super().load_weights(tensors)
            self.derived = derive(self.qkv.detach())
            return loaded

    model = Derives()
    copies = Copies(model, model.load_weights)
    with torch.inference_mode(inference):
        for seed in range(2):
            assert load(copies, weights(seed)) == "model"
            assert torch.equal(model.derived, derive(model.qkv))


def test_a_tensor_that_comes_twice_is_refused(caplog):
    caplog.set_level(logging.INFO)
    model = Toy()
    copies = Copies(model, model.load_weights)
    twice = [*weights(0), *weights(1)[7:8]]
    assert load(copies, twice, bucket=20) == "model"
    assert "norm comes twice" in caplog.text
    assert_loaded(model, twice)


def test_tensors_that_share_some_of_their_memory_are_refused(caplog):
    caplog.set_level(logging.INFO)
    model = Toy()
    copies = Copies(model, model.load_weights)
    tensors = weights(0)
    tensors[7] = ("norm", tensors[0][1][3])
    assert load(copies, tensors, bucket=20) == "model"
    assert "embed and norm overlap" in caplog.text
    assert load(copies, weights(1), bucket=20) == "model"
    assert_loaded(model, weights(1))


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (lambda loaded: None, "does not say what it has loaded"),
        (lambda loaded: loaded | {"bias"}, "bias is no parameter"),
    ],
)
def test_a_load_whose_account_cannot_be_checked_is_refused(claim, reason, caplog):
    caplog.set_level(logging.INFO)
    model = Toy()
    copies = Copies(model, lambda tensors: claim(model.load_weights(tensors)))
    assert load(copies, weights(0)) == "model"
    assert reason in caplog.text


def test_a_parameter_that_was_only_partly_copied_is_refused(caplog):
    caplog.set_level(logging.INFO)
    model = Toy()
    copies = Copies(model, model.load_weights)
    assert load(copies, [pair for pair in weights(0) if pair[0] != "k"]) == "model"
    assert f"{2 * HEADS * WIDTH * 2} of the {3 * HEADS * WIDTH * 2} bytes of qkv are copies" in caplog.text


def test_two_copies_to_one_place_are_refused_because_their_order_matters(caplog):
    class Twice(Toy):
        def _load_one(self, name: str, tensor: Tensor) -> str:
            return super()._load_one("q" if name == "k" else name, tensor)

    caplog.set_level(logging.INFO)
    model = Twice()
    copies = Copies(model, model.load_weights)
    assert load(copies, weights(0)) == "model"
    assert "same destination" in caplog.text


@pytest.mark.parametrize("change", ["data", "parameter", "module"])
def test_moved_parameters_are_learnt_anew(change):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Toy()

        def load_weights(self, tensors: Named) -> set[str]:
            return {f"inner.{name}" for name in self.inner.load_weights(tensors)}

    model = Outer()
    copies = Copies(model, model.load_weights)
    assert [load(copies, weights(0)) for _ in range(2)] == ["learnt", "repeated"]
    if change == "data":
        model.inner.qkv.data = model.inner.qkv.data.clone()
    elif change == "parameter":
        model.inner.qkv = nn.Parameter(model.inner.qkv.data.clone())
    else:
        model.inner = Toy()
    assert load(copies, weights(1)) == "learnt"
    assert_loaded(model.inner, weights(1))
    assert load(copies, weights(2)) == "repeated"
    assert_loaded(model.inner, weights(2))


def test_parameter_replaced_while_it_loads_is_not_learnt(caplog):
    class Replaces(Toy):
        def load_weights(self, tensors: Named) -> set[str]:
            self.qkv.data = self.qkv.data.clone()
            return super().load_weights(tensors)

    caplog.set_level(logging.INFO)
    model = Replaces()
    copies = Copies(model, model.load_weights)
    for seed in range(2):
        assert load(copies, weights(seed), bucket=20) == "model"
        assert_loaded(model, weights(seed))


@pytest.mark.parametrize("change", ["name", "dtype", "strides"])
def test_tensor_that_was_not_there_before_is_loaded_by_the_model_and_learnt_next_time(change):
    model, copies = learnt()
    other = weights(1)
    name, tensor = other[7]
    assert name == "norm"
    if change == "name":
        other.append(("rotary.1", tensor))
        model._load_one = lambda n, t: "" if n == "rotary.1" else Toy._load_one(model, n, t)
    elif change == "dtype":
        other[7] = (name, tensor.float())
    else:
        other[7] = (name, tensor.repeat_interleave(2)[::2])
    assert load(copies, other) == "model"
    assert_loaded(model, weights(1))
    assert load(copies, other) == "learnt"
    assert load(copies, other) == "repeated"
    assert_loaded(model, weights(1))


def test_load_that_broke_off_teaches_nothing_and_the_next_one_does():
    model = Toy()
    copies = Copies(model, model.load_weights)
    copies.begin()
    copies.load(weights(0)[:4])
    with pytest.raises(KeyError):
        copies.load([("unknown", torch.zeros(1))])
    assert load(copies, weights(1)) == "learnt"
    copies.begin()
    copies.load(weights(2)[:4])
    assert load(copies, weights(3)) == "repeated"
    assert_loaded(model, weights(3))


class Pair(nn.Module):
    """Two matrices, which a trainer that ties them sends as one tensor under two names."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(4, 3))
        self.head = self.embed if tied else nn.Parameter(torch.empty(4, 3))
        self._tied = tied

    @torch.no_grad()
    def load_weights(self, tensors: Named) -> set[str]:
        taken = [(name, tensor) for name, tensor in tensors if not (self._tied and name == "head")]
        for name, tensor in taken:
            getattr(self, name).copy_(tensor)
        return {name for name, _ in taken}


@pytest.mark.parametrize("tied", [True, False])
def test_one_tensor_under_two_names_is_repeated_as_long_as_it_is_one(tied):
    model = Pair(tied=tied)
    copies = Copies(model, model.load_weights)
    for kind in ("learnt", "repeated"):
        both = torch.randn(4, 3)
        assert load(copies, [("embed", both), ("head", both.view(4, 3))]) == kind
        assert torch.equal(model.embed, both)
        assert torch.equal(model.head, both)
    embed, head = torch.randn(2, 4, 3)
    assert load(copies, [("embed", embed), ("head", head)]) == "model"
    assert torch.equal(model.embed, embed)
    assert torch.equal(model.head, embed if tied else head)


class Chained(nn.Module):
    """One parameter, loaded in pieces from a view of a tensor into a view of the parameter."""

    def __init__(self, view: Callable[[Tensor], Tensor], like: Tensor, axis: int, pieces: int) -> None:
        super().__init__()
        self._view, self._axis, self._pieces = view, axis % like.ndim, pieces
        order = list(reversed(range(like.ndim)))
        self.weight = nn.Parameter(torch.empty([like.shape[i] for i in order], dtype=torch.float64))
        self._order = order

    @torch.no_grad()
    def load_weights(self, tensors: Named) -> set[str]:
        ((_, tensor),) = tensors
        into = self.weight.permute(self._order).chunk(self._pieces, self._axis)
        for destination, source in zip(into, self._view(tensor).chunk(self._pieces, self._axis), strict=True):
            destination.copy_(source)
        return {"weight"}


STEPS = st.lists(st.tuples(st.sampled_from(["narrow", "transpose", "select", "chunk", "flip"]), st.integers(0, 11)))


def chain(steps: list[tuple[str, int]]) -> Callable[[Tensor], Tensor]:
    """A view made in several steps, each fitted to the shape that it meets; at least one dimension is left."""

    def view(tensor: Tensor) -> Tensor:
        for step, number in steps:
            axis = number % tensor.ndim
            size = tensor.shape[axis]
            match step:
                case "narrow":
                    tensor = tensor.narrow(axis, start := number % size, max(1, (size - start) // 2))
                case "transpose":
                    tensor = tensor.transpose(axis, (axis + 1) % tensor.ndim)
                case "select" if tensor.ndim > 1:
                    tensor = tensor.select(axis, number % size)
                case "chunk":
                    tensor = tensor.chunk(2, axis)[-1]
                case "flip" if tensor.is_contiguous():
                    tensor = tensor.view(tensor.shape[::-1])
        return tensor

    return view


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 3), st.integers(1, 3))
def test_any_chain_of_views_is_learnt_and_repeated_bit_for_bit(steps, axis, pieces):
    view = chain(steps)
    first, second = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0)), torch.randn(4, 6, 5)
    model = Chained(view, view(first[0]), axis, pieces)
    copies = Copies(model, model.load_weights)
    assert load(copies, [("w", first[0])]) == "learnt"
    assert load(copies, [("w", second)]) == "repeated"
    repeated = model.weight.detach().clone()
    model.load_weights([("w", second)])
    assert torch.equal(repeated, model.weight)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)), max_size=4))
def test_overlap_is_found_exactly_between_blocks_of_one_matrix(blocks):
    matrix, count = torch.zeros(6, 6, dtype=torch.bfloat16), torch.zeros(6, 6)
    for row, rows, column, columns in blocks:
        count[row : row + rows, column : column + columns] += 1
    parts = [matrix[row : row + rows, column : column + columns] for row, rows, column, columns in blocks]
    assert overlap(parts) == bool((count > 1).any())
