"""M2PO's clip range from the second moment of the log-ratio over the whole global batch.

The range depends on every token of the optimiser step, so it must not be computed on a micro-batch. `histogram` returns
sums that the engine adds up over micro-batches and ranks (`Algorithm.statistics`), and `threshold` reads the range off
the total: the same for any cut of the batch. Bins are 0.5 % wide in tau; within a bin tau^2 is interpolated linearly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NUM_BINS = 2048
SMALLEST, LARGEST = 1e-3, 20.0
"""Range of |log x|: below the first nothing needs a clip, the second is where log-ratios are clamped."""
_STEP = math.log(LARGEST / SMALLEST) / NUM_BINS


def histogram(log_ratio_T: Tensor, advantages_T: Tensor) -> dict[str, Tensor]:
    """Counts and sums of D^2 by |D|, over the tokens where a clip could act: A > 0, D > 0 or A < 0, D < 0."""
    acts_T = (log_ratio_T * advantages_T) > 0
    size_T = log_ratio_T.abs().clamp(SMALLEST, LARGEST)
    bin_T = ((size_T / SMALLEST).log() / _STEP).long().clamp(0, NUM_BINS - 1)
    weight_T = acts_T.to(log_ratio_T.dtype)
    zeros = log_ratio_T.new_zeros(NUM_BINS)
    return {
        "m2po/count": zeros.index_add(0, bin_T, weight_T),
        "m2po/square": zeros.index_add(0, bin_T, weight_T * log_ratio_T**2),
    }


def threshold(statistics: dict[str, Tensor], budget: float) -> Tensor:
    """The largest tau with sum min(D^2, tau^2) <= budget * H; 20 when all of them fit. A scalar tensor."""
    count, square = statistics["m2po/count"].double(), statistics["m2po/square"].double()
    low = (count.new_ones(NUM_BINS).cumsum(0) - 1.0).mul(_STEP).exp() * SMALLEST
    high = low * math.exp(_STEP)
    below, at_least = square.cumsum(0) - square, count.sum() - count.cumsum(0) + count  # of each bin's lower edge
    moment_low = below + at_least * low**2  # sum min(D^2, tau^2) at tau = an edge; it rises with tau
    moment_high = below + square + (at_least - count) * high**2
    allowed = budget * count.sum()
    i = (moment_high <= allowed).sum().clamp(max=NUM_BINS - 1)  # tau is in this bin
    share = ((allowed - moment_low) / (moment_high - moment_low).clamp(min=1e-12)).clamp(0.0, 1.0)
    return (low**2 + share * (high**2 - low**2)).sqrt()[i].to(statistics["m2po/count"].dtype)
