"""Memory that was freed stays with the process, in huge pages where the operating system has them to give.

A training step allocates and frees the same large tensors in every layer. glibc hands blocks of that size back to the
operating system, which clears each page anew when it is touched again. What is kept is what the step's next allocation
takes, so the peak stays as it is; and where a page is 2 MiB and not 4 KiB, there are fewer to clear and to look up.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MADV_HUGEPAGE = 14  # sys/mman.h
HUGE_PAGE = 1 << 21
LARGEST = 1 << 30
"""Bytes from which on a block is the operating system's nevertheless: weights, not what passes through a step."""


def keep_freed_memory() -> bool:
    """From here on, in this process. False where it is not for us to say: another C library, or another allocator."""
    if not sys.platform.startswith("linux"):
        return False
    c = ctypes.CDLL(None)
    if getattr(c, "mallopt", None) is None:
        return False
    kept = bool(c.mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(c.mallopt(M_TRIM_THRESHOLD, -1))
    if kept:
        _in_huge_pages(c, LARGEST - HUGE_PAGE)
    return kept


def _in_huge_pages(c: ctypes.CDLL, size: int) -> None:
    """What the heap grows by next, up to ``size`` bytes. Addresses alone: no page is touched. Where there are no huge
    pages, or not so many addresses, everything stays as it was."""
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.argtypes, c.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := c.malloc(size):
        first = -(-block // HUGE_PAGE) * HUGE_PAGE
        c.madvise(first, (block + size - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        c.free(block)
