"""How a process of a run holds its memory. Called by `roles.py` when a process starts, and by benchmarks.

glibc hands freed memory back to the kernel as soon as some of it lies together, and gets it back page by page: for a
group of 256 KB that costs more than copying it (bench.md). A process that moves groups all day keeps what it has freed.
"""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 256 << 20
"""Freed memory at the end of each of malloc's heaps (one per thread, about) that stays with the process."""
LARGEST_BYTES = 32 << 20
"""Blocks up to this size come from such a heap; larger ones come from the kernel and go back to it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Tell malloc to keep what was freed. False where the C library has no such switch (anything but glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
