"""Bounds the time and memory of foreign code in this process, through the operating system.

For work that is quick unless it is broken, such as a chat template; untrusted code runs in separate processes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

SECONDS = 5.0
"""The processor time that one call may take."""
MEMORY = 1 << 30
"""The bytes that it may add to those of the process."""
_turn = threading.RLock()
"""One block at a time: the limit that another has set must not pass for the process's own."""


class Overrun(Exception):
    """The code exceeded its time or memory."""


@contextlib.contextmanager
def bounded(*, seconds: float = 0.0, memory: int = 0) -> Iterator[None]:
    """Raises Overrun if the block takes more processor time or memory than allowed: by default SECONDS and MEMORY.

    For a moment in which no other thread allocates much: the limit of memory is the process's. Threads take turns.
    Outside the main thread, where Python allows no handlers, time has no limit.
    """
    memory = memory or MEMORY
    with _turn, _memory(memory), _time(seconds or SECONDS):
        try:
            yield
        except MemoryError:
            raise Overrun(f"it needs more than {memory >> 20} MiB") from None


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    # Processor time: a busy machine, or a process that is stopped for a while, changes nothing.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise Overrun(f"it is not done after {seconds:g} s of processor time")

    # SIGVTALRM is this process's own timer of processor time; SIGALRM belongs to utils.signals.
    before = signal.signal(signal.SIGVTALRM, end)
    # Repeats, for code that handles every error and goes on.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _memory(more: int) -> Iterator[None]:
    import resource

    # The limit is on address space, so it counts from what the process has mapped already: first field of statm.
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # a system that does not say how large the process is
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more
    # A limit that somebody has set stays the upper bound.
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
