"""Sums and maxima that are added up over micro-batches and ranks, so that every metric is one of the global batch.

Used by step.py. Names may differ between ranks (one with an empty micro-batch has fewer); the result is the same.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.training.ranks import Ranks


class Totals:
    """Named float64 arrays; `add` adds, `highest` keeps the largest."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value).detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def highest(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value).detach().double()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def merge(self, other: Totals) -> None:
        """Add another's sums and keep the larger maxima."""
        for name, value in other.sums.items():
            self.add(name, value)
        for name, value in other.maxima.items():
            self.highest(name, value)

    def over_ranks(self, ranks: Ranks) -> Totals:
        """The totals of all ranks, on all ranks; added in order of rank, so that all get the same bits."""
        own = msgspec.json.encode((_plain(self.sums), _plain(self.maxima)))
        result = Totals()
        for data in ranks.gather(own):
            sums, maxima = msgspec.json.decode(data, type=tuple[dict[str, list], dict[str, list]])
            for name, (shape, values) in sums.items():
                result.add(name, _tensor(shape, values))
            for name, (shape, values) in maxima.items():
                result.highest(name, _tensor(shape, values))
        return result

    def number(self, name: str) -> float:
        """A scalar sum; 0 when nothing was added under that name."""
        return float(self.sums[name]) if name in self.sums else 0.0


def _plain(arrays: dict[str, Tensor]) -> dict[str, tuple[list[int], list[float | str]]]:
    """JSON has no infinity and no NaN: those travel as text."""
    return {
        name: (list(value.shape), [v if np.isfinite(v) else str(v) for v in value.flatten().tolist()])
        for name, value in arrays.items()
    }


def _tensor(shape: list[int], values: list[float | str]) -> Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64).reshape(shape)
