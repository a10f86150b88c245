"""Sums and means over the responses of a packed batch.

Called by objectives, corrections and diagnostics that work on whole responses. `sequence_T` gives each token's
response; responses may be empty, and nothing here divides by zero. Tensor methods only: no torch import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def segment_sum(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """(T,) -> (B,): the sum over each response's tokens; 0 for an empty one."""
    return values_T.new_zeros(num_sequences).index_add(0, sequence_T, values_T)


def segment_mean(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """(T,) -> (B,): the mean over each response's tokens; 0 for an empty one."""
    lengths_B = segment_sum(values_T.new_ones(values_T.shape), sequence_T, num_sequences)
    return segment_sum(values_T, sequence_T, num_sequences) / lengths_B.clamp(min=1)


def segment_min(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """(T,) -> (B,): the smallest value of each response; +inf for an empty one."""
    start_B = values_T.new_full((num_sequences,), float("inf"))
    return start_B.scatter_reduce(0, sequence_T, values_T, "amin")


def segment_suffix_sum(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """(T,) -> (T,): from each token to the end of its response, itself included."""
    until_T = values_T.cumsum(0)
    ends_B = segment_sum(values_T, sequence_T, num_sequences).cumsum(0)
    return ends_B[sequence_T] - until_T + values_T
