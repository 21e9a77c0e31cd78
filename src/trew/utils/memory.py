"""Measures memory: what this process holds, and what it can still get. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def used_bytes() -> int:
    """The bytes of RAM that this process holds now; 0 if the system does not report it."""
    try:
        return int(re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        return 0


def return_freed() -> None:
    """Returns freed memory to the operating system, wherever in the heap it lies. glibc keeps freed blocks of up to 32
    MiB otherwise, and later blocks of other sizes do not fit into the gaps. Does nothing with another C library."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def free_bytes(device: str = "cpu") -> int | None:
    """The bytes still available, of a GPU's memory or of RAM within the control group's limit; None if unknown."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(match[1]) * 1024 if match else None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    if limit.isdecimal():
        left = max(0, int(limit) - used)
        free = left if free is None else min(free, left)
    return free
