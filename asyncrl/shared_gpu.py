"""What the launcher tells processes that share a GPU, in their environment.

Not in the configuration: that is kept in the run folder, and a run may be resumed where there are more GPUs. Set by
`placement.py`; read by the sender of weights and by the vLLM engine. Imports nothing of asyncrl.
"""

from __future__ import annotations

import os

WITH_GENERATOR = "ASYNCRL_GPU_WITH_GENERATOR"
"""`1` for trainer ranks where a generator computes on a GPU that another one, or rank 0, computes on too."""
MEMORY_SHARE = "ASYNCRL_GPU_MEMORY_SHARE"
"""For a generator: the part of its GPU's memory that vLLM may take, where nothing else was asked for."""

ALONE = {WITH_GENERATOR: "", MEMORY_SHARE: ""}
"""For a process of which nothing else is said: what a run inherits from another one, from within which it was started,
is not meant for it."""

BESIDE_TRAINER = 0.3
"""Of a GPU that also holds a trainer rank, whose optimiser alone is six times the generator's weights."""
BESIDE_OTHERS = 0.9


def with_generator() -> bool:
    """Whether this process is a trainer rank whose weight group has two members on one GPU."""
    return os.environ.get(WITH_GENERATOR) == "1"


def memory_share() -> float | None:
    """vLLM's part of the memory of a GPU that it shares; None where it has its own."""
    share = os.environ.get(MEMORY_SHARE)
    return float(share) if share else None
