"""The local engine's second set of weights: received into while the first set serves, then swapped in.

Twice the model's memory buys a swap that takes microseconds and an old model that is intact whenever a sync fails.
`local.py` writes into it from the receiving thread; the engine's thread swaps between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Staging:
    """Tensors beside each parameter and persistent buffer of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Tied parameters appear under each of their names: a sender may use any of them.
        self._live: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._parameters = {id(p) for p in model.parameters()}
        self._staged: dict[int, Tensor] = {}
        self._filled: set[int] = set()

    def begin(self, names: Iterable[str]) -> None:
        """Prepare for these tensors. Raises ValueError unless they are all the model's and cover its parameters."""
        names = set(names)
        unknown = sorted(names - self._live.keys())
        given = {id(self._live[name]) for name in names - set(unknown)}
        missing = sorted(n for n, t in self._live.items() if id(t) in self._parameters - given)
        if unknown or missing:
            raise ValueError(f"weights do not fit the model: unknown {unknown[:5]}, missing {missing[:5]}")
        self._filled = set()

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Copy whole tensors into the staged set, converting their type. Raises ValueError on another shape."""
        for name, tensor in tensors:
            live = self._live[name]
            if id(live) in self._filled:  # another name of a tied weight
                continue
            if tensor.shape != live.shape:
                raise ValueError(f"{name}: the model has {tuple(live.shape)}, the sender {tuple(tensor.shape)}")
            if id(live) not in self._staged:
                self._staged[id(live)] = torch.empty_like(live, requires_grad=False)
            self._staged[id(live)].copy_(tensor)
            self._filled.add(id(live))

    def swap(self) -> None:
        """Serve the staged set; what served becomes the next staging area. Raises RuntimeError when it is not whole."""
        if missing := self._parameters - self._filled:
            raise RuntimeError(f"{len(missing)} parameters were never received; refusing to serve half-new weights")
        for live in {id(t): t for t in self._live.values()}.values():
            if id(live) in self._filled:
                served = live.data
                live.data = self._staged[id(live)]
                self._staged[id(live)] = served
        self._filled = set()
