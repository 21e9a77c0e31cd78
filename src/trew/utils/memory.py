"""Measures memory: what this process holds and held at most, and what it can still get. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path


def used_bytes() -> int:
    """The bytes of RAM that this process holds now; 0 if the system does not report it."""
    return _status("VmRSS") or 0


def _status(name: str) -> int | None:
    """A size in /proc/self/status, in bytes; None if the system does not report it."""
    try:
        # The kernel writes kB and means KiB.
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


class Peaks:
    """The most memory that was held in each phase of this process: of a GPU's, or else of RAM.

    RAM is measured by phase where the system lets a process's peak begin again (Linux); elsewhere :attr:`most` alone is
    known.
    """

    def __init__(self, device: str = "cpu", *, phase: str = "loading") -> None:
        self._device, self._phase = device, phase
        self._by_phase = device.startswith("cuda") or _status("VmHWM") is not None
        self.phases: dict[str, int] = {}
        self._most = 0

    @property
    def most(self) -> int:
        """The most bytes that were held at any time."""
        return max(self._most, self._now())

    def enter(self, phase: str) -> None:
        """Ends the phase before, and begins another."""
        peak = self._now()
        self._most = max(self._most, peak)
        if self._by_phase:
            self.phases[self._phase] = max(self.phases.get(self._phase, 0), peak)
            self._by_phase = self._begin_again()
        self._phase = phase

    def _now(self) -> int:
        """The peak since it last began."""
        if self._device.startswith("cuda"):
            import torch

            # Since the last reset: of tensors, without what torch keeps cached.
            return torch.cuda.max_memory_allocated(self._device)
        if (peak := _status("VmHWM")) is not None:
            return peak
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, kibibytes elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _begin_again(self) -> bool:
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5: the peak of resident memory alone
        except OSError:
            return False
        return True


LARGE = 4 << 20
"""Bytes of a block that :func:`return_large_blocks` applies to: below the matrices of models of 100 million parameters,
and above what is allocated for each token."""
_M_MMAP_THRESHOLD = -3  # malloc.h


def return_large_blocks() -> bool:
    """Has freed blocks of :data:`LARGE` bytes and more returned to the operating system at once, from here on; returns
    whether the C library could be told so.

    glibc keeps freed blocks of up to 32 MiB in its heap otherwise. Where blocks of many sizes come and go, as gathered
    weights, gradients and activations do, later ones do not fit into the gaps. The price: pages of a new block are
    cleared again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))


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
    known = [int(match[1]) * 1024 if match else None, _left_in_group()]
    return min((size for size in known if size is not None), default=None)


GROUPS = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Where control groups of version 2, and of version 1, say their limit of memory, what is used, and of what kind."""


def _left_in_group() -> int | None:
    """The bytes that the control group of a container still lets its processes have; None without a limit."""
    for limit, used, kinds in _LIMITS:
        try:
            most, now = (GROUPS / limit).read_text().strip(), int((GROUPS / used).read_text())
            kept = dict(re.findall(r"^(\w+) (\d+)$", (GROUPS / kinds).read_text(), re.MULTILINE))
        except (OSError, ValueError):
            continue
        if not most.isdecimal():  # "max": no limit
            return None
        # Pages of files that were read count as used, but are given up when memory is needed, as in MemAvailable: after
        # a model was downloaded they may be most of it. Version 1 has the sum over groups below it as total_...
        files = sum(int(kept.get(f"total_{name}", kept.get(name, 0))) for name in ("inactive_file", "active_file"))
        return max(0, int(most) - max(0, now - files))
    return None
