"""Releases the pages of read-only, file-backed weights to the operating system between two uses.

A model loaded in the type that its weights are stored in is not copied: the file is mapped, and a page of it counts as
memory of the process once it is read. A reference model is read once per step, layer by layer; pages need not stay
after that. They usually remain in the page cache, so that reading them again costs page faults, one for 16 pages or so,
and no disk access.

The mapping is private: a page that somebody wrote belongs to the process alone, and releasing it would undo the write
silently. The kernel reports such pages (proc(5), /proc/pid/pagemap); if a span has one, nothing of it is released.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

MADV_DONTNEED = 4  # sys/mman.h
OF_A_FILE, SWAPPED, PRESENT = 1 << 61, 1 << 62, 1 << 63  # bits of a page in pagemap


class FileBacked:
    """``parts``: groups of tensors that are read, and released, together. Tensors outside of files are never released,
    and on systems other than Linux none are."""

    def __init__(self, parts: Sequence[Iterable[Tensor]]) -> None:
        self._tensors = [[t.detach() for t in part] for part in parts]  # while they live, so does the mapping
        files = _files() if sys.platform.startswith("linux") else []
        self._pages = [_whole_pages(part, files) for part in self._tensors]

    def release_pages(self, part: int) -> None:
        """Releases the pages of a part, except spans with a page that was written."""
        for start, stop in self._pages[part]:
            if _unwritten(start, stop):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)

    def release_all(self) -> None:
        """Releases the pages of all parts."""
        for part in range(len(self._pages)):
            self.release_pages(part)


def _files() -> list[tuple[int, int]]:
    """Returns the addresses of private file mappings."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        # Columns: addresses, rights, offset, device, inode, and a path that may be missing.
        addresses, rights, _, _, inode, *_ = line.split()
        # "p": private. Inode 0: anonymous memory, whose content would be lost.
        if rights.endswith("p") and inode != "0":
            start, stop = (int(a, 16) for a in addresses.split("-"))
            found.append((start, stop))
    return found


def _whole_pages(tensors: Iterable[Tensor], files: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (start, stop) of the spans of whole file pages that hold nothing but these tensors."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.device.type == "cpu" and t.nbytes)
    # Rounded inwards: the pages at a span's ends hold bytes of other tensors too.
    page = mmap.PAGESIZE
    inside = ((-(-start // page) * page, stop // page * page) for start, stop in _joined(spans, files))
    return [(start, stop) for start, stop in inside if start < stop]


def _joined(spans: Iterable[tuple[int, int]], files: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The spans inside of ``files``, those that touch or overlap as one."""
    joined: list[list[int]] = []
    for start, stop in spans:
        # Left alone: memory outside of files, or a tensor in more than one mapping.
        if not any(first <= start and stop <= last for first, last in files):
            continue
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(stop, joined[-1][1])
        else:
            joined.append([start, stop])
    return joined


def _unwritten(start: int, stop: int) -> bool:
    """Whether all pages still belong to the file, or are not in memory."""
    page = mmap.PAGESIZE
    # pagemap has 8 bytes per page.
    wanted = (stop - start) // page * 8
    try:
        table = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            read = os.pread(table, wanted, start // page * 8)
        finally:
            os.close(table)
    except OSError:  # not permitted, or not supported: assume the worst
        return False
    pages = np.frombuffer(read, dtype=np.uint64)
    # A page copied on write is anonymous: present without OF_A_FILE, or swapped out (file pages are never swapped).
    ours = (pages & np.uint64(SWAPPED) != 0) | (pages & np.uint64(PRESENT | OF_A_FILE) == np.uint64(PRESENT))
    # After a short read, the state of the remaining pages is unknown.
    return len(read) == wanted and not ours.any()
