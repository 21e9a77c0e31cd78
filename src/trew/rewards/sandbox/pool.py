"""Jobs for the sandbox, and the small processes that run them: started when needed, kept, replaced when they die."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .host.boxes import Design
from .host.frames import Channel, Closed

# The supervisor is a package of its own there: the standard library and nothing of trew.
_BOOT = """
import importlib.util, json, sys
folder, design, parent = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("host", folder + "/__init__.py", submodule_search_locations=[folder])
package = importlib.util.module_from_spec(spec)
sys.modules["host"] = package
spec.loader.exec_module(package)
from host.boxes import Design
from host.supervisor import main
main(Design(**json.loads(design)), parent=int(parent))
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. ``seconds`` are of CPU, of all its processes together, and of sleep; ``memory`` is in
    bytes (address space of each process, resident memory of all of them); the rest is counted in bytes too.

    A clock of the wall stands behind them, generous because a loaded machine must not make a program wrong.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    processes: int = 64
    file: int = 16 << 20
    output: int = 4 << 20
    answers: int = 8 << 20

    @property
    def wall(self) -> float:
        return 15.0 + 6 * self.seconds


@dataclass(frozen=True, slots=True)
class Job:
    """``script`` runs a program with an input; ``calls`` imports it and makes the given calls of ``entry``; ``tests``
    has the calls made by asserts that run in a box of their own. ``parts`` are what ``host.supervisor`` expects."""

    mode: Literal["script", "calls", "tests"]
    parts: tuple[bytes, ...]
    limits: Limits = Limits()
    entry: str = "-"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: ``exit`` with a status, ``limit`` of its own that it ran into, or ``failed`` (ours; ``why``).

    ``clock`` says that the limit was the clock of the wall; ``parts`` are the bytes that came back, ``judge`` how the
    box with the asserts ended.
    """

    ended: Literal["exit", "limit", "running", "failed"]
    why: str
    status: int | None = None
    parts: tuple[bytes, ...] = ()
    cpu: float = 0.0
    peak: int = 0
    seconds: float = 0.0
    judge: dict[str, Any] | None = None

    @property
    def clock(self) -> bool:
        return self.why.startswith("clock: ")


class Supervisor:
    """One process that runs jobs one after the other. Raises Closed where it dies while it starts."""

    def __init__(self, design: Design):
        folder = str(Path(__file__).parent / "host")
        command = [sys.executable, "-I", "-S", "-c", _BOOT, folder, json.dumps(asdict(design)), str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
                                        stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno())
        try:
            self.ready = self.channel.receive()[0]
        except Closed:
            self.close()
            raise

    def run(self, job: Job) -> Outcome:
        """The job's outcome; raises Closed when the process died."""
        limits = job.limits
        message = {"mode": job.mode, "entry": job.entry, **asdict(limits), "wall": limits.wall,
                   "cpu": math.ceil(limits.seconds) + 1}  # fmt: skip
        self.channel.send(message, job.parts)
        reply, parts = self.channel.receive()
        return Outcome(parts=tuple(parts), **reply)

    def close(self) -> None:
        """Hangs up; the process ends what it runs and itself."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pool:
    """Supervisors for one boundary; as many as there are processors, each started when it is first needed.

    Safe to use from any thread. Every job is run in a fresh sandbox; a supervisor that dies is replaced and its job
    tried once more, after which the outcome is ``failed``.
    """

    def __init__(self, design: Design, *, size: int | None = None):
        self.design = design
        self.size = size or max(1, len(os.sched_getaffinity(0)))
        self.owner = os.getpid()
        self._idle: queue.LifoQueue[Supervisor | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._closed = False

    def run(self, job: Job) -> Outcome:
        """One job's outcome; waits for a supervisor to be free."""
        supervisor = self._idle.get()
        try:
            for _ in range(2):
                try:
                    supervisor = supervisor or Supervisor(self.design)
                except Closed:
                    continue
                if not supervisor.ready["ready"]:
                    why = supervisor.ready["why"]
                    supervisor.close()
                    supervisor = None
                    return Outcome("failed", why)
                try:
                    return supervisor.run(job)
                except Closed:
                    supervisor.close()
                    supervisor = None
            return Outcome("failed", "the process that runs the sandbox died twice")
        except BaseException:  # an interrupt in the middle of a message: the next one would be out of step
            if supervisor is not None:
                supervisor.process.kill()  # what it runs dies with it
                supervisor.close()
                supervisor = None
            raise
        finally:
            self._put_back(supervisor)

    def run_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """All outcomes, in order, as many at a time as there are supervisors."""
        return run_together(self.run, jobs, size=self.size)

    def _put_back(self, supervisor: Supervisor | None) -> None:
        with self._lock:
            if self._closed and supervisor is not None:
                supervisor.close()
                supervisor = None
            self._idle.put(supervisor)

    def close(self) -> None:
        """Ends every supervisor; those at work end when their job is done."""
        with self._lock:
            self._closed = True
            waiting = []
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._idle.get_nowait())
            for supervisor in waiting:
                if supervisor is not None:
                    supervisor.close()
                self._idle.put(None)


def run_together(function: Any, items: Sequence[Any], *, size: int) -> list[Any]:
    """``[function(item) for item in items]`` with ``size`` threads, which end with the call."""
    if len(items) < 2 or size < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(size, len(items)), thread_name_prefix="trew-sandbox") as threads:
        return list(threads.map(function, items))


_pools: dict[Design, Pool] = {}
_lock = threading.Lock()


def pool(design: Design) -> Pool:
    """The process's pool for ``design``; a forked child gets one of its own."""
    with _lock:
        there = _pools.get(design)
        if there is None or there.owner != os.getpid():
            there = _pools[design] = Pool(design)
        return there


def drop(design: Design) -> None:
    """Ends the pool for ``design``."""
    with _lock:
        there = _pools.pop(design, None)
    if there is not None:
        there.close()


def close_pools() -> None:
    """Ends every supervisor that this process started."""
    with _lock:
        mine = [p for p in _pools.values() if p.owner == os.getpid()]
        _pools.clear()
    for one in mine:
        one.close()


def _forget_after_fork() -> None:
    """In a forked child: the parent's pipes are closed here, so that they do not outlive the parent."""
    global _lock
    _lock = threading.Lock()
    for one in _pools.values():
        while True:
            try:
                supervisor = one._idle.get_nowait()
            except (queue.Empty, RuntimeError):
                break
            if supervisor is not None:
                for pipe in (supervisor.process.stdin, supervisor.process.stdout):
                    if pipe is not None:
                        os.close(pipe.fileno())
    _pools.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_pools)
