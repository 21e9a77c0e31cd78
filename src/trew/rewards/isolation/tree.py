"""Measures and ends a process tree: a process and all its descendants. Linux only, read from /proc."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a whole tree: CPU seconds, idle seconds (see ``UsageWatch``), resident bytes, number of tasks."""

    cpu: float = 0.0
    idle: float = 0.0
    resident: int = 0
    tasks: int = 0


class UsageWatch:
    """Samples the usage of a process and its descendants.

    Idle time is the time in which no task ran or waited for a processor. A sleeping program idles; a program that
    waits on a loaded machine does not. So a limit on CPU plus idle time does not depend on the machine's load.
    """

    def __init__(self, root: int):
        self.root = root
        self._at = time.monotonic()
        # By thread: nanoseconds it ran or waited to run, and the time of the last sample before they grew.
        self._ran: dict[int, tuple[int, float]] = {}
        self._used: dict[int, float] = {}  # by process: seconds of CPU, including processes that have ended
        self._cpu = 0.0
        self._idle = 0.0
        self._gap = 0.0  # seconds without a sign of work, in which a thread may have waited for a processor

    def look(self) -> Usage:
        now = time.monotonic()
        busiest, inherited, resident, tasks = 0, 0.0, 0, 0
        ran: dict[int, tuple[int, float]] = {}
        owners: dict[int, int] = {}
        for process in [self.root, *descendants(self.root)]:
            try:
                with open(f"/proc/{process}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
            except OSError:  # it ended since it was listed
                continue
            if not fields:  # it is ending: the kernel may return an empty line
                continue
            # Fields follow "pid (comm)", and comm may hold brackets and blanks, hence the rpartition. Counted from 0
            # behind it: 11 utime, 12 stime, 13 cutime, 14 cstime (in ticks), 21 rss (in pages); see proc(5).
            own = (int(fields[11]) + int(fields[12])) / _TICK
            self._used[process] = max(own, self._used.get(process, 0.0))
            inherited += own + (int(fields[13]) + int(fields[14])) / _TICK
            resident += int(fields[21]) * _PAGE
            tasks += len(threads)
            for thread in threads:
                before, since = self._ran.get(thread, (0, self._at))
                there = _scheduled(process, thread)
                ran[thread], owners[thread] = (there, since if there == before else self._at), process
                busiest = max(busiest, there - before)
        # Two lower bounds of the CPU time, neither complete: cutime and cstime miss children that were not reaped, the
        # sum of samples misses processes that lived between two of them.
        cpu = max(inherited, sum(self._used.values()))
        # The busiest thread stands for the tree: the sum over parallel threads can exceed the time that passed. Threads
        # that take turns, and processes too short to be sampled, show in the CPU time alone.
        passed = now - self._at
        self._add_gap(passed - max(busiest / 1e9, min(cpu - self._cpu, passed)), passed)
        self._at, self._ran, self._cpu = now, ran, cpu
        self._settle(owners)
        return Usage(cpu, self._idle, resident, tasks)

    def _add_gap(self, seconds: float, passed: float) -> None:
        """Counts the time of an interval in which nothing ran; below 0 where a thread ran or waited for longer than the
        interval: the kernel adds a wait up when it ends, and it began in earlier ones."""
        # A smaller gap is within the error of these samples on a loaded machine.
        if seconds > passed / 2 or seconds < 0:
            self._gap = max(self._gap + seconds, 0.0)

    def _settle(self, owners: dict[int, int]) -> None:
        """Takes a gap for idle time, but for as long as a thread that is ready to run has not got a processor."""
        if self._gap:
            waits = [self._at - since for thread, (_, since) in self._ran.items() if _ready(owners[thread], thread)]
            idle = max(self._gap - max(waits, default=0.0), 0.0)
            self._idle, self._gap = self._idle + idle, self._gap - idle


def _ready(process: int, thread: int) -> bool:
    """Whether a thread runs or waits for a processor."""
    try:
        with open(f"/proc/{process}/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"R"]
    except OSError:  # it ended since
        return False


def _scheduled(process: int, thread: int) -> int:
    """Returns the nanoseconds that a thread ran or waited for a processor."""
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return int(ran) + int(waited)
    except (OSError, ValueError):
        return 0


def tasks_of_user(user: int) -> int:
    """Counts the user's tasks that /proc shows. RLIMIT_NPROC counts per user, not per program."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
            except OSError:  # it ended since it was listed
                continue
            if int(lines.get(b"Uid", b"-1").split()[0]) == user:
                found += int(lines.get(b"Threads", b"1"))
    return found


def descendants(root: int) -> list[int]:
    """Lists the processes below ``root``, without ``root``; stops at a few thousand."""
    # The bound keeps one sample short even during a fork bomb.
    found, new = [], children(root)
    while new and len(found) < 4096:
        found += new
        new = [child for process in new for child in children(process)]
    return found


def children(process: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:  # this thread has ended, or the kernel has no such lists
            if not _lists_children():
                return _children_by_parent(process)
    return found


def _lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _children_by_parent(process: int) -> list[int]:
    """Finds children by scanning /proc, for kernels without CONFIG_PROC_CHILDREN."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == process:
                found.append(int(name))
    return found


def end_children(*, seconds: float = 5.0) -> bool:
    """Kills and reaps every child of this process, adopted ones included. False if some are left after ``seconds``.

    This process must adopt orphans (``lifelines``) and have one thread. Only its own children are ever killed, and a
    child keeps its number until it is reaped, so no other process can be hit.
    """
    until = time.monotonic() + seconds
    pause = 0.0002
    # Repeated, because the children of a killed child are adopted only once it is dead.
    while True:
        for child in children(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
