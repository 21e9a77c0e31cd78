"""Memory that was freed stays with the process.

A training step allocates and frees the same large tensors in every layer. glibc hands blocks of that size back to the
operating system, which clears each page anew when it is touched again. What is kept is what the step's next allocation
takes, so the peak stays as it is.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 1 << 30
"""Bytes from which on a block is the operating system's nevertheless: weights, not what passes through a step."""


def keep_freed_memory() -> bool:
    """From here on, in this process. False where it is not for us to say: another C library, or another allocator."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
