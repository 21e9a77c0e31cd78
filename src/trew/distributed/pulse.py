"""Finds ranks that hang: each leaves a sign of life while it computes, and the process that started them looks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = "TREW_RANKS"
"""Environment variable: the folder that the ranks of a node share with the process that started them."""
STACKS_S = 3.0
"""Seconds that a hanging rank has to print where it hangs."""


class Pulse:
    """The sign of life of one rank: a file that exists while it computes together with others, as old as its last
    progress. A rank that waits for rank 0, or scores, has none: that may take any time."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(FOLDER)
        self._file = Path(folder) / f"pulse-{rank}" if folder else None
        self._last = 0.0
        if self._file is not None:
            faulthandler.enable()  # SIGABRT prints the stacks of all threads

    def busy(self) -> None:
        """From now on this rank must make progress."""
        if self._file is not None:
            # The pid is what the watch sends its signals to.
            self._file.write_text(str(os.getpid()))
            self._last = time.monotonic()

    def beat(self) -> None:
        """Progress."""
        # Once a second at most: beats come with every pack and every poll of an engine.
        if self._file is not None and time.monotonic() - self._last > 1:
            self._last = time.monotonic()
            with contextlib.suppress(FileNotFoundError):  # not busy
                os.utime(self._file)

    def idle(self) -> None:
        """From now on this rank may wait."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Watch:
    """While open, ends ranks that are busy without progress for ``limit_s`` seconds, so that all are started again.

    Only time in which this process runs counts: on a machine that was suspended, ranks stood still as well. By the
    times of their files alone they would seem to hang, as they would where the clock is set."""

    def __init__(self, folder: Path, limit_s: float, tell: Callable[[str], None]) -> None:
        self._folder, self._limit_s, self._tell = folder, limit_s, tell
        self._pause_s = min(limit_s / 10, 5)
        self._looked: float | None = None
        self._ages: dict[Path, tuple[int, float]] = {}  # of signs of life: their time, and for how long they have it
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trew-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._pause_s):
            if stale := self.stale(time.monotonic()):
                self._end(stale)

    def stale(self, now: float) -> list[Path]:
        """The signs of life of ranks that have made no progress for too long, at the time ``now`` of the monotonic
        clock."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * self._pause_s)
        self._looked, before, self._ages = now, self._ages, {}
        for pulse in sorted(self._folder.glob("pulse-*")):
            # Gone since the folder was listed: the rank has become idle.
            with contextlib.suppress(OSError):
                beat = pulse.stat().st_mtime_ns
                last, age = before.get(pulse, (beat, 0.0))
                self._ages[pulse] = beat, age + passed if beat == last else 0.0
        return [pulse for pulse, (_, age) in self._ages.items() if age > self._limit_s and _alive(pulse)]

    def _end(self, stale: list[Path]) -> None:
        ranks = ", ".join(pulse.name.partition("-")[2] for pulse in stale)
        self._tell(
            f"no progress for {self._limit_s:g} s (cluster.hang_s) on rank {ranks}; each prints where it is, and all "
            "ranks are ended"
        )
        pids = [int(text) for pulse in stale if (text := _read(pulse)).isdecimal()]
        for signum in (signal.SIGABRT, signal.SIGKILL):  # one that is stopped (SIGSTOP) prints nothing
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            # SIGABRT first, which prints the stacks; the wait lets that finish before the kill.
            self._closed.wait(STACKS_S)
        for pulse in stale:
            # Its pid may be given to another process, which must not be killed for it.
            pulse.unlink(missing_ok=True)


def _alive(pulse: Path) -> bool:
    """Whether the rank is still there: one that died has left its sign of life behind, and is the agent's matter."""
    text = _read(pulse)
    return text.isdecimal() and Path(f"/proc/{text}").exists()


def _read(pulse: Path) -> str:
    try:
        return pulse.read_text()
    except OSError:
        return ""
