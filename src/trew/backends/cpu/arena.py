"""Keeps freed memory in the process, in huge pages where the operating system provides them.

A training step allocates and frees the same large tensors in every layer. glibc returns blocks of that size to the
operating system, which clears each page again on its next use. Keeping them does not raise the peak, because the step's
next allocation reuses them; and pages of 2 MiB rather than 4 KiB are fewer to clear and to look up.

This works only while freed blocks merge with their free neighbours. torch aligns its blocks and leaves slivers between
them. A small long-lived object in such a sliver keeps two large free blocks apart, and a larger allocation then takes
new memory: the heap fragments. So small objects get room elsewhere (:func:`_room_for_small`), and tensors that live for
a whole run (:func:`zeros`) stay outside the heap.
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
HEADER = 8  # bytes of each chunk that malloc uses itself
SMALL = {size: 3000 if size <= 160 else 150 for size in range(32, 1040, 16)} | {
    size << 10: 96 // size for size in (2, 4, 8, 16, 32)
}
"""Sizes of chunks, and the initial number of free ones of each: 9 MiB, more than a step leaves behind."""
LARGEST = 1 << 30
"""Blocks of at least this many bytes still go back to the operating system: weights, not a step's temporary tensors."""


def keep_freed_memory() -> bool:
    """Switches this process over; returns whether it could. False with another C library or allocator."""
    if not sys.platform.startswith("linux"):
        return False
    # The process itself: the C library that torch allocates from. Some, like musl, have no mallopt.
    c = ctypes.CDLL(None)
    if getattr(c, "mallopt", None) is None:
        return False
    # Both are needed: blocks above the mmap threshold bypass the heap, and the trim threshold returns the heap's end.
    kept = bool(c.mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(c.mallopt(M_TRIM_THRESHOLD, -1))
    if kept:
        _room_for_small()
        _in_huge_pages(LARGEST - HUGE_PAGE)
    return kept


def zeros(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns float32 zeros on the CPU that do not overlap. On Linux all lie in one separate mapping, whose pages take
    memory only once they are written."""
    if not sys.platform.startswith("linux"):
        return [torch.zeros(*shape, dtype=torch.float32) for shape in shapes]
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-4 * math.prod(shape) // 64) * 64  # 4 bytes each, rounded up to a cache line
    # At least one byte: mmap refuses a size of 0.
    memory = _mapping(max(end, 1))
    if memory is None:  # torch's own error says best how much memory is lacking
        return [torch.zeros(*shape, dtype=torch.float32) for shape in shapes]
    # Views into the mapping, each of which keeps it alive.
    return [
        torch.frombuffer(memory, dtype=torch.float32, count=math.prod(shape), offset=start).view(tuple(shape))
        for shape, start in zip(shapes, starts, strict=True)
    ]


class Arena:
    """Memory outside the heap that large temporary buffers share in turn: activations kept by the learner, the KV cache
    of generation.

    Each takes a little more or less than the one before. From the heap, a block freed by one would not fit the next.
    Packed layer weights for generation do come from the heap, where the gradients were, unless few weights are trained.
    The packed head is allocated here: together with the layers it would be as large as the gradients, and not fit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[Tensor] = []
        self._taken = 0  # bytes in use of the last block

    @contextlib.contextmanager
    def lease(self) -> Iterator[Arena]:
        """Takes a turn: memory allocated inside the block is invalid after it. Yields another arena while a turn lasts,
        rather than wait: two turns nested in one thread would deadlock."""
        if not self._lock.acquire(blocking=False):
            yield Arena()
            return
        try:
            # Keeps only the newest block: alloc() makes it as large as all before it together, so that the same work
            # fits into one block in the next turn.
            self._blocks = self._blocks[-1:]
            self._taken = 0
            yield self
        finally:
            self._lock.release()

    def give_back(self) -> None:
        """Memory of turns that have ended, to the operating system."""
        # Never waits: a turn in progress still uses its blocks, and keeps them.
        if self._lock.acquire(blocking=False):
            self._blocks = []
            self._lock.release()

    def alloc(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory, aligned to 64 bytes: a cache line, and the widest vector."""
        # Rounded up to a cache line, so that the next allocation is aligned too.
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        # The new block is as large as all blocks before it and this request together: see lease().
        if not self._blocks or self._taken + size > len(self._blocks[-1]):
            self._blocks.append(_block(sum(map(len, self._blocks)) + size))
            self._taken = 0
        found = self._blocks[-1][self._taken : self._taken + math.prod(shape) * dtype.itemsize]
        self._taken += size
        return found.view(dtype).view(shape)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Frees the memory that was allocated inside the block when it ends."""
        before = len(self._blocks), self._taken
        yield
        # Once a new block was started, the old offset means nothing; that memory is freed with the lease.
        if len(self._blocks) == before[0]:
            self._taken = before[1]


def _block(size: int) -> Tensor:
    """Returns bytes aligned to 64: twice as many if possible, since pages that are never written cost nothing."""
    memory = (_mapping(2 * size) or _mapping(size)) if sys.platform.startswith("linux") else None
    if memory is not None:
        return torch.frombuffer(memory, dtype=torch.uint8)
    # torch promises less than 64: cuts the start off up to the next cache line.
    block = torch.empty(size + 64, dtype=torch.uint8)
    return block[-block.data_ptr() % 64 :]


def _mapping(size: int) -> mmap.mmap | None:
    """Maps ``size`` bytes of zeros, whose pages are allocated on the first write; None if there are not that many."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_HUGEPAGE)
    return memory


@functools.cache
def _room_for_small() -> None:
    """Puts free chunks of every small size into the heap, far from large blocks, for small objects to use.

    Each lies between two chunks that are never freed, so it can never merge into a larger one. malloc reuses chunks of
    a size in the order in which they were freed, so these come first. M_MXFAST = 0 makes slivers merge with their
    neighbours at once, instead of waiting in a bin for the next request of their size.
    """
    c = _c_library()
    c.mallopt(M_MXFAST, 0)
    # All are taken before the first is freed: malloc would hand a chunk that was freed at once out again.
    blocks = []
    for size, count in SMALL.items():
        for _ in range(count):
            blocks.append(c.malloc(size - HEADER))
            c.malloc(HEADER)  # never freed
    # Only the chunks of SMALL are freed; the fences between them stay for the life of the process.
    for block in blocks:
        c.free(block)


def _c_library() -> ctypes.CDLL:
    c = ctypes.CDLL(None)
    # Declared, because ctypes takes results for 32-bit integers and would cut addresses off.
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]
    c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return c


def _in_huge_pages(size: int) -> None:
    """Requests huge pages for the heap's next ``size`` bytes: allocates and frees them without touching a page. Without
    huge pages, or enough address space, nothing changes."""
    c = _c_library()
    if block := c.malloc(size):
        # madvise takes whole pages only: round the start up and the end down.
        first = -(-block // HUGE_PAGE) * HUGE_PAGE
        c.madvise(first, (block + size - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        c.free(block)
