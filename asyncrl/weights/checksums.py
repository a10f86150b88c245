"""A checksum of a bucket, computed where its bytes are and equal on every device.

Called by sender and receiver on each bucket. Two reads of the bucket, no temporaries of its size, no copy to the host:
the bytes are seen as a matrix of 32-bit words whose row sums and column sums (modulo 2**32) are mixed, each with its
position, into 64 bits. One changed word changes its row's sum; two swapped words change the sums of their rows, or of
their columns if they share a row. It guards against faults (a torn or stale buffer, a wrong offset, a bad link), not
against an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 4096
"""Words in a row."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: splitmix64's increment
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def checksum(buffer: Tensor) -> Tensor:
    """Checksum of `buffer`, uint8 of a length divisible by 4: an int64 scalar on the same device, not yet computed
    when that is a GPU."""
    words = buffer.view(torch.int32)
    rows = words.numel() // WIDTH
    matrix, rest = words[: rows * WIDTH].view(rows, WIDTH), words[rows * WIDTH :]
    sums = torch.cat([matrix.sum(1, dtype=torch.int32), matrix.sum(0, dtype=torch.int32), rest]).to(torch.int64)
    return _mix(sums).sum()


def _mix(sums: Tensor) -> Tensor:
    """splitmix64 of each value combined with its position; int64 arithmetic wraps alike everywhere."""
    position = torch.arange(1, len(sums) + 1, device=sums.device, dtype=torch.int64)
    x = sums + position * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
