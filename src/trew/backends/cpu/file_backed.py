"""Releases the pages of read-only, file-backed weights to the operating system between two uses.

Weights of the type that they are stored in are not copied when a model is loaded: the file is mapped, and a page of it
becomes memory of the process when it is first read. A reference model is read once in a step, layer by layer; what
has been read need not stay. It is still in the page cache, unless that has a better use for the room: reading it again
costs page faults, one for 16 pages or so, and no disk access.

The mapping is private, so a page that somebody wrote is the process's alone, and giving it back would undo that. Which
pages those are, the kernel tells (proc(5), /proc/pid/pagemap), and where there is one, nothing is given back.
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
    """``parts``: tensors that are read, and released, together. What lies in no file stays where it is, and so does
    everything on other systems than Linux."""

    def __init__(self, parts: Sequence[Iterable[Tensor]]) -> None:
        self._tensors = [[t.detach() for t in part] for part in parts]  # while they live, so does the mapping
        files = _files() if sys.platform.startswith("linux") else []
        self._pages = [_whole_pages(part, files) for part in self._tensors]

    def release_pages(self, part: int) -> None:
        """The pages of a part, unless somebody wrote on one."""
        for start, stop in self._pages[part]:
            if _unwritten(start, stop):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)

    def release_all(self) -> None:
        """Those of all parts."""
        for part in range(len(self._pages)):
            self.release_pages(part)


def _files() -> list[tuple[int, int]]:
    """Addresses of private mappings of files."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, rights, _, _, inode, *_ = line.split()
        if rights.endswith("p") and inode != "0":
            start, stop = (int(a, 16) for a in addresses.split("-"))
            found.append((start, stop))
    return found


def _whole_pages(tensors: Iterable[Tensor], files: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """From where to where pages of files hold nothing but these tensors."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.device.type == "cpu" and t.nbytes)
    joined: list[list[int]] = []
    for start, stop in spans:
        if not any(first <= start and stop <= last for first, last in files):
            continue
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(stop, joined[-1][1])
        else:
            joined.append([start, stop])
    page = mmap.PAGESIZE
    inside = ((-(-start // page) * page, stop // page * page) for start, stop in joined)
    return [(start, stop) for start, stop in inside if start < stop]


def _unwritten(start: int, stop: int) -> bool:
    """Whether all pages are the file's own, or not there."""
    page = mmap.PAGESIZE
    wanted = (stop - start) // page * 8
    try:
        table = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            read = os.pread(table, wanted, start // page * 8)
        finally:
            os.close(table)
    except OSError:  # a system that does not tell
        return False
    pages = np.frombuffer(read, dtype=np.uint64)
    ours = (pages & np.uint64(SWAPPED) != 0) | (pages & np.uint64(PRESENT | OF_A_FILE) == np.uint64(PRESENT))
    return len(read) == wanted and not ours.any()
