"""Learns which copies the loading of a model comes down to, and makes them again without the model's loading code.

A model that serves loads each tensor of a checkpoint, or its shard of it, by copying it to its place in a parameter,
which may hold several (fused q/k/v). Where that is depends on names and shapes only, yet finding it costs an engine's
loader more time than the bytes need on the wire. So `Copies` watches the first complete load and repeats it from then
on: one call per bucket. Whatever is more than copies is not learnt: the model's own code then loads every time. The
vLLM worker calls it, on a GPU; it knows torch and nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Named = list[tuple[str, Tensor]]
LoadWeights = Callable[[Named], set[str] | None]
Kind = tuple[torch.dtype, torch.dtype, bool]

log = logging.getLogger(__name__)


class Copies:
    """One model's way of loading. A load is `begin()`, `load()` for each bucket, `finish()`; not finishing is allowed.

    Only a load that finished teaches anything. What was learnt is forgotten when parameters have moved or tensors come
    that were not there before.
    """

    def __init__(self, model: nn.Module, load_weights: LoadWeights) -> None:
        self.model = model
        self.last: Literal["model", "learnt", "repeated"] = "model"
        """How the last load was made; "learnt" is the model's own code, watched with success."""
        self._load_weights = load_weights
        self._plan: Plan | None = None
        self._watch: Watch | None = None
        self._places: Places | None = None
        self._refused = False

    def begin(self) -> None:
        """A load starts: whether it repeats or is watched is decided here."""
        self.last = "model"
        if self._plan is not None and self._places is not None and self._places.hold():
            self.last = "repeated"
            return
        self._plan = None
        if not self._refused:
            self._watch, self._places = Watch(self.model), Places(self.model)

    def load(self, tensors: Named) -> set[str]:
        """Load one bucket; returns the names of the parameters that it wrote into."""
        if self._plan is not None:
            loaded = self._plan.repeat(tensors)
            if loaded is not None:
                return loaded
            self._plan, self.last = None, "model"
        if self._watch is None:
            return self._load_weights(tensors) or set()
        with self._watch.over(tensors):
            loaded = self._load_weights(tensors)
        self._watch.loaded(loaded)
        return loaded or set()

    def finish(self) -> None:
        """The load is complete."""
        if self._plan is not None:
            self._plan.fill()
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        watch.check()
        if watch.refusal is None:
            self._plan, self.last = Plan(watch.recipes, watch.fills), "learnt"
            return
        self._refused = True
        log.info("loading this model is more than copies (%s): its own code runs at every sync", watch.refusal)


class Plan:
    """A load that was watched, ready to be made again with other values."""

    def __init__(self, recipes: dict[str, Recipe], fills: list[Fill]) -> None:
        self._recipes = recipes
        self._fills = fills

    @torch.no_grad()
    def repeat(self, tensors: Named) -> set[str] | None:
        """Copy one bucket's tensors; None, and nothing is copied, when one of them is not as it was."""
        present = dict(tensors)
        groups: dict[Kind, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        loaded: set[str] = set()
        for name, tensor in tensors:
            recipe = self._recipes.get(name)
            if recipe is None or not recipe.fits(tensor, present):
                return None
            for copy in recipe.copies:
                destinations, sources = groups[copy.kind]
                destinations.append(copy.destination)
                sources.append(copy.source(tensor))
                loaded.add(copy.parameter)
        for destinations, sources in groups.values():
            torch._foreach_copy_(destinations, sources)
        return loaded

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants (padding), which no tensor brings."""
        for fill in self._fills:
            fill.destination.fill_(fill.value)


class Watch(TorchDispatchMode):
    """Sees every operation while the model loads: records the copies, and refuses what a copy cannot repeat."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.refusal: str | None = None
        self.recipes: dict[str, Recipe] = {}
        self.fills: list[Fill] = []
        self._parameters = {name: Span.of(tensor) for name, tensor in tensors_of(model)}
        self._sizes = {name: tensor.nbytes for name, tensor in tensors_of(model)}
        self._written: set[str] = set()
        self._homes = defaultdict(list)
        for name, span in self._parameters.items():
            self._homes[span.storage].append(name)
        self._sources: dict[Span, tuple[str, Tensor]] = {}
        self._storages: set[int] = set()

    def over(self, tensors: Named) -> Watch:
        """Enter it for the loading of these tensors: `with watch.over(tensors): ...`."""
        self._sources = {}
        for name, tensor in tensors:
            if name in self.recipes:
                self.refuse(f"{name} comes twice")
            owner, _ = self._sources.setdefault(Span.of(tensor), (name, tensor))
            self.recipes[name] = Recipe(layout(tensor), owner if owner != name else None)
        self._storages = {span.storage for span in self._sources} | set(self._homes)
        return self

    def loaded(self, names: set[str] | None) -> None:
        """What the model says it has loaded."""
        if names is None:
            self.refuse("it does not say what it has loaded")
        self._written |= names or set()

    def refuse(self, reason: str) -> None:
        """The load cannot be repeated; the first reason is kept."""
        self.refusal = self.refusal or reason

    def check(self) -> None:
        """After the load: refuse it unless each byte of what was loaded was written, by one copy."""
        copies = [copy for recipe in self.recipes.values() for copy in recipe.copies]
        covered: dict[str, int] = defaultdict(int)
        writes: list[Copy | Fill] = [*copies, *self.fills]
        for write in writes:
            covered[write.parameter] += write.destination.nbytes
        if overlap([write.destination for write in writes]):
            self.refuse("two copies have the same destination")
        for name in sorted(self._written | set(covered)):
            if name not in self._sizes:
                self.refuse(f"{name} is no parameter")
            elif covered[name] != self._sizes[name]:
                self.refuse(f"{covered[name]} of the {self._sizes[name]} bytes of {name} are copies")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.refusal is None and self._touches((args, kwargs)):
            self._see(func, args, result)
        return result

    def _touches(self, values: Any) -> bool:
        """Whether any tensor with elements among these lies in the tensors being loaded or in a parameter."""
        return any(storage_of(tensor) in self._storages for tensor in tensors_in(values))

    def _see(self, func: Any, args: Any, result: Any) -> None:
        if func is torch.ops.aten.copy_.default:
            self._see_copy(args[0], args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            self._see_fill(args[0], args[1])
        elif func is torch.ops.aten.zero_.default:
            self._see_fill(args[0], 0)
        elif not is_view(func) or not all(self._touches(tensor) for tensor in tensors_in(result)):
            self.refuse(str(func))  # a "view" may have copied: contiguous() seen whole, as in inference mode

    def _see_copy(self, destination: Tensor, source: Tensor) -> None:
        source = source.expand(destination.shape)
        parameter = self._parameter_of(destination)
        span = Span.of(source)
        inside = [named for outer, named in self._sources.items() if span in outer]
        if parameter is None or not inside:
            self.refuse(f"{torch.ops.aten.copy_.default} between other tensors")
        elif len(inside) > 1:
            self.refuse(f"{inside[0][0]} and {inside[1][0]} overlap")
        elif source.dtype != inside[0][1].dtype or source.is_conj() or source.is_neg():
            self.refuse(f"{inside[0][0]} is reinterpreted")
        else:
            name, tensor = inside[0]
            self.recipes[name].copies.append(Copy.of(destination, source, tensor, parameter))

    def _see_fill(self, destination: Tensor, value: float) -> None:
        parameter = self._parameter_of(destination)
        if parameter is None:
            self.refuse("it overwrites what it was given")
        else:
            self.fills.append(Fill(destination, value, parameter))

    def _parameter_of(self, tensor: Tensor) -> str | None:
        span = Span.of(tensor)
        names = self._homes.get(span.storage, [])
        return next((name for name in names if span in self._parameters[name]), None)


class Places:
    """Where a model's parameters and buffers are. Asking whether they still are takes no walk through its modules."""

    def __init__(self, model: nn.Module) -> None:
        holders = [held for m in model.modules() for held in (m._modules, m._parameters, m._buffers)]
        self._slots = [(held, key, value) for held in holders for key, value in held.items()]
        self._tensors = [(tensor, tensor.data_ptr(), layout(tensor)) for _, tensor in tensors_of(model)]

    def hold(self) -> bool:
        """True while they are the same modules and tensors, in the same memory, laid out as they were."""
        if any(held.get(key) is not value for held, key, value in self._slots):
            return False
        with torch._C.DisableTorchFunctionSubclass():  # a subclass of Parameter makes these ten times slower
            return all(tensor.data_ptr() == at and layout(tensor) == known for tensor, at, known in self._tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The bytes from a tensor's first element to its last, within its storage."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.itemsize
        elements = reach + 1 if tensor.numel() else 0
        return cls(storage_of(tensor), start, start + elements * tensor.itemsize)

    def __contains__(self, other: Span) -> bool:
        return self.storage == other.storage and self.start <= other.start and other.stop <= self.stop


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """From a part of one tensor that comes to a place in a parameter."""

    destination: Tensor
    parameter: str
    part: tuple[tuple[int, ...], tuple[int, ...], int] | None
    """Shape, strides and offset within the tensor, in elements; None: all of it, as it is."""
    kind: Kind
    """What one foreach call must have in common to be one kernel: both dtypes, and whether the strides agree."""

    @classmethod
    def of(cls, destination: Tensor, source: Tensor, tensor: Tensor, parameter: str) -> Copy:
        whole = layout(source) == layout(tensor)
        part = (tuple(source.shape), source.stride(), int(source.storage_offset() - tensor.storage_offset()))
        kind = (destination.dtype, source.dtype, destination.stride() == source.stride())
        return cls(destination, parameter, None if whole else part, kind)

    def source(self, tensor: Tensor) -> Tensor:
        if self.part is None:
            return tensor
        shape, strides, offset = self.part
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """A place in a parameter that loading sets to a constant."""

    destination: Tensor
    value: float
    parameter: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of one tensor: its copies, none when the model skips it."""

    layout: tuple
    same_as: str | None
    """The tensor of the same bucket whose memory this one shares (a tied head); the copies are noted there."""
    copies: list[Copy] = dataclasses.field(default_factory=list)

    def fits(self, tensor: Tensor, present: dict[str, Tensor]) -> bool:
        """Whether this tensor may be used in place of the one that was watched."""
        if layout(tensor) != self.layout:
            return False
        if self.same_as is None:
            return True
        other = present.get(self.same_as)
        return other is not None and Span.of(other) == Span.of(tensor)


def layout(tensor: Tensor) -> tuple:
    """Shape, strides and dtype."""
    return tensor.shape, tensor.stride(), tensor.dtype


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart, those without an address (meta) too, as long as they live."""
    return tensor.untyped_storage()._cdata


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors, but for empty ones, in nested arguments or results."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.numel()]


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


def is_view(func: Any) -> bool:
    """Whether an operator, by its schema, returns a view of an argument and writes to none."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def overlap(tensors: list[Tensor]) -> bool:
    """Whether any byte belongs to two of these."""
    by_storage = defaultdict(list)
    for tensor in tensors:
        by_storage[storage_of(tensor)].append(tensor)
    return any(map(_overlap, by_storage.values()))


def _overlap(tensors: list[Tensor]) -> bool:
    """The same for tensors of one storage: by their spans, and byte by byte where those interleave (columns)."""
    spans = sorted((Span.of(tensor) for tensor in tensors), key=lambda span: span.start)
    if all(left.stop <= right.start for left, right in itertools.pairwise(spans)):
        return False
    taken = torch.zeros(max(span.stop for span in spans), dtype=torch.bool)
    for tensor in tensors:
        shape, strides = (*tensor.shape, tensor.itemsize), (*(s * tensor.itemsize for s in tensor.stride()), 1)
        mine = taken.as_strided(shape, strides, Span.of(tensor).start)
        if mine.any():
            return True
        mine.fill_(True)
    return False
