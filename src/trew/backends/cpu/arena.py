"""Keeps freed memory in the process, in huge pages where the operating system provides them.

A training step allocates and frees the same large tensors in every layer. glibc returns blocks of that size to the
operating system, which clears each page again when it is next touched. Keeping them does not raise the peak, because
the step's next allocation reuses them; and pages of 2 MiB rather than 4 KiB are fewer to clear and to look up.

That holds as long as what is freed grows together again. torch aligns its blocks and leaves slivers between them; a
small object that takes one and lives on keeps two large blocks apart, and the next that is larger than either is new
memory. So small objects find room elsewhere, and what stays for a whole run (:func:`zeros`) is not of the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3  # malloc.h
MADV_HUGEPAGE = 14  # sys/mman.h
HUGE_PAGE = 1 << 21
HEADER = 8  # bytes of a chunk that are the C library's
SMALL = {size: 3000 if size <= 160 else 150 for size in range(32, 1040, 16)} | {
    size << 10: 96 // size for size in (2, 4, 8, 16, 32)
}
"""Sizes of chunks, and the initial number of free ones of each: 9 MiB, more than a step leaves behind."""
LARGEST = 1 << 30
"""Blocks from this many bytes on still go to the operating system: weights, not a step's temporary tensors."""


def keep_freed_memory() -> bool:
    """From here on, in this process. False where it is not for us to say: another C library, or another allocator."""
    if not sys.platform.startswith("linux"):
        return False
    c = ctypes.CDLL(None)
    if getattr(c, "mallopt", None) is None:
        return False
    kept = bool(c.mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(c.mallopt(M_TRIM_THRESHOLD, -1))
    if kept:
        _room_for_small()
        _in_huge_pages(LARGEST - HUGE_PAGE)
    return kept


def give_back_freed() -> None:
    """The pages of all memory that is free now go to the operating system, wherever in the heap they lie; with another
    C library than glibc none do."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def zeros(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 zeros on the CPU that share no storage; on Linux all of them in one mapping of their own, whose pages are
    taken when they are first written."""
    if not sys.platform.startswith("linux"):
        return [torch.zeros(*shape) for shape in shapes]
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-4 * math.prod(shape) // 64) * 64
    memory = _mapping(max(end, 1))
    if memory is None:  # torch says best what there is not enough of
        return [torch.zeros(*shape) for shape in shapes]
    return [
        torch.frombuffer(memory, dtype=torch.float32, count=math.prod(shape), offset=start).view(tuple(shape))
        for shape, start in zip(shapes, starts, strict=True)
    ]


class Arena:
    """Memory outside the heap for large things that pass, by turns: what the learner's passes keep, the cache of
    generation. Each takes a little more or less than the one before: from the heap, what one frees would not fit what
    the next takes. Layers laid out for generation are of the heap, where gradients were, unless few weights are
    trained; with the head they would be as large as those, and not fit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[Tensor] = []
        self._taken = 0  # bytes of the last block

    @contextlib.contextmanager
    def lease(self) -> Iterator[Arena]:
        """A turn: what is allocated inside the block is lost behind it. Another arena where a turn has not ended."""
        if not self._lock.acquire(blocking=False):
            yield Arena()
            return
        try:
            self._blocks = self._blocks[-1:]  # where one block was not enough, the last one is as large as all
            self._taken = 0
            yield self
        finally:
            self._lock.release()

    def give_back(self) -> None:
        """Memory of turns that have ended, to the operating system."""
        if self._lock.acquire(blocking=False):
            self._blocks = []
            self._lock.release()

    def alloc(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised numbers, aligned to 64 bytes."""
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        if not self._blocks or self._taken + size > len(self._blocks[-1]):
            self._blocks.append(_block(sum(map(len, self._blocks)) + size))
            self._taken = 0
        found = self._blocks[-1][self._taken : self._taken + math.prod(shape) * dtype.itemsize]
        self._taken += size
        return found.view(dtype).view(shape)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Memory allocated inside the block is free again after it."""
        before = len(self._blocks), self._taken
        yield
        if len(self._blocks) == before[0]:
            self._taken = before[1]


def _block(size: int) -> Tensor:
    """Bytes at a multiple of 64: twice as many if there are, since pages that nobody writes cost nothing."""
    memory = (_mapping(2 * size) or _mapping(size)) if sys.platform.startswith("linux") else None
    if memory is not None:
        return torch.frombuffer(memory, dtype=torch.uint8)
    block = torch.empty(size + 64, dtype=torch.uint8)
    return block[-block.data_ptr() % 64 :]


def _mapping(size: int) -> mmap.mmap | None:
    """``size`` bytes of zeros, whose pages are allocated on the first write; None where there are not that many."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without
        memory.madvise(MADV_HUGEPAGE)
    return memory


@functools.cache
def _room_for_small() -> None:
    """Free chunks of every small size, far from large blocks, each between two that are never freed: what is freed
    there stays as small as it is. Chunks of a size are taken in the order in which they were freed, so these come
    first, once slivers join their neighbours at once (M_MXFAST = 0) and do not wait for the next of their size."""
    c = _c_library()
    c.mallopt(M_MXFAST, 0)
    blocks = []
    for size, count in SMALL.items():
        for _ in range(count):
            blocks.append(c.malloc(size - HEADER))
            c.malloc(HEADER)  # never freed
    for block in blocks:
        c.free(block)


def _c_library() -> ctypes.CDLL:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]
    c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return c


def _in_huge_pages(size: int) -> None:
    """What the heap grows by next, up to ``size`` bytes. Addresses alone: no page is touched. Where there are no huge
    pages, or not so many addresses, everything stays as it was."""
    c = _c_library()
    if block := c.malloc(size):
        first = -(-block // HUGE_PAGE) * HUGE_PAGE
        c.madvise(first, (block + size - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        c.free(block)
