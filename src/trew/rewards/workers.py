"""A pool of small processes for work that may hang, crash or eat memory: each verdict has limits, none slows the next.

A worker is a fresh interpreter (``worker_process.py``; no fork of the training process, no torch) that loads a task
file, gets it warm, and forks a runner. The runner does the work: its CPU time per call is limited by a timer that the
kernel enforces, its memory by RLIMIT_AS; it is replaced after a number of calls, when it has grown, and whenever a
limit ends it, which costs milliseconds because the worker stays warm. Limits are in CPU time, so that a verdict does
not depend on what else the machine does; a generous wall clock is there for what uses no CPU at all.

A worker ends when its pipe closes or its parent is gone. Ctrl-C does not reach it.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "cpu", "memory", "wall", "died"]
_KEPT = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH"}
)  # fmt: skip
START_S = 120.0  # for an interpreter and its imports on a loaded machine


@dataclass(frozen=True, slots=True)
class Limits:
    """Per call: ``cpu_s`` seconds of CPU time, ``memory_mb`` MiB beyond what the warm task has, ``wall_s`` seconds.
    A runner is replaced after ``calls`` calls, or when it has grown by ``growth_mb`` MiB."""

    cpu_s: float = 3.0
    memory_mb: int = 512
    wall_s: float = 60.0
    calls: int = 500
    growth_mb: int = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` done with the task's ``value``; cpu or memory: the work ran past its own limit; wall or died: no fault
    of the work that we know of, and it was tried twice."""

    status: Status
    value: Any = None
    detail: str = ""


class Broken(Exception):
    """A worker did not answer as it should; it is ended and its call tried once more on a fresh one."""


class Worker:
    """One process. Not for two threads at once."""

    def __init__(self, task: Path, limits: Limits):
        self.limits = limits
        script = Path(__file__).with_name("worker_process.py")
        # What reads a model's text has no use for secrets, nor for settings of Python that are not about its files.
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith("LC_")}
        environment = {**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            # -P: the folder of this file has modules called numbers and countdown
            [
                sys.executable,
                "-P",
                "-W",
                "ignore",
                str(script),
                str(task),
                json.dumps(vars_of(limits)),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._buffer = b""
        self._ready = False

    def call(self, payload: Any) -> Outcome:
        """The task's answer to ``payload``; raises Broken, after which the worker must be ended."""
        if not self._ready:
            if json.loads(self._line(START_S)) != "ready":
                raise Broken("did not start")
            self._ready = True
        assert self.process.stdin is not None
        try:
            data = memoryview(json.dumps(payload).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) :]
        except OSError as error:
            raise Broken(str(error)) from error
        status, value = json.loads(self._line(self.limits.wall_s + 30.0))
        if status in ("wall", "died"):
            raise Broken(f"{status}: {value}")
        return Outcome(status, value if status == "done" else None, "" if status == "done" else str(value))

    def _line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Broken(f"wall: no answer in {seconds:g} s")
                piece = os.read(self.process.stdout.fileno(), 65536)
                if not piece:
                    raise Broken("died: its pipe closed")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        """Ends the process and its runner, waits for it, closes the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(0.5)  # it sees its pipe close, and takes its runner along
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def vars_of(limits: Limits) -> dict[str, float]:
    """The limits by name."""
    return {name: getattr(limits, name) for name in Limits.__slots__}


class Pool:
    """Up to ``size`` workers for one task, started when needed. ``run`` may be called from any thread."""

    def __init__(self, task: Path, *, limits: Limits | None = None, size: int | None = None):
        self.task = task
        self.limits = limits or Limits()
        self.size = size or max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
        self._idle: list[Worker] = []
        self._count = 0
        self._free = threading.Condition()
        self._closed = False
        _open_pools.append(self)

    def run(self, payload: Any) -> Outcome:
        """The task's answer. A worker that breaks is replaced and the call tried once more, then it is given up."""
        detail = ""
        for _ in range(2):
            worker = self._take()
            try:
                outcome = worker.call(payload)
            except (Broken, ValueError, OSError) as error:
                detail = str(error)
                self._give(worker, healthy=False)
            except BaseException:  # Ctrl-C in the middle of a call: the answer to it is still to come
                self._give(worker, healthy=False)
                raise
            else:
                self._give(worker, healthy=True)
                return outcome
        return Outcome("wall" if detail.startswith("wall") else "died", None, detail)

    def run_many(self, payloads: Sequence[Any]) -> list[Outcome]:
        """The answers in the order of ``payloads``, as many at once as there are workers."""
        if len(payloads) < 2 or self.size == 1:
            return [self.run(payload) for payload in payloads]
        with ThreadPoolExecutor(min(self.size, len(payloads))) as threads:
            return list(threads.map(self.run, payloads))

    def close(self) -> None:
        """Ends all workers; those at work end when their call does."""
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            if self in _open_pools:
                _open_pools.remove(self)
        for worker in idle:
            worker.end()

    def _take(self) -> Worker:
        with self._free:
            while True:
                if self._closed:
                    raise RuntimeError("the pool is closed")
                if self._idle:
                    return self._idle.pop()
                if self._count < self.size:
                    self._count += 1
                    break
                self._free.wait()
        try:
            return Worker(self.task, self.limits)
        except BaseException:
            with self._free:
                self._count -= 1
                self._free.notify()
            raise

    def _give(self, worker: Worker, *, healthy: bool) -> None:
        keep = healthy and not self._closed
        if not keep:
            worker.end()
        with self._free:
            if keep:
                self._idle.append(worker)
            else:
                self._count -= 1
            self._free.notify()

    def _forget(self) -> None:
        """After a fork: the workers belong to the parent. Their pipes are closed here, and nobody is waited for."""
        self._free = threading.Condition()
        for worker in self._idle:
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    pipe.close()
            worker.process.returncode = 0  # or Popen would wait for a process that is not its child
        self._idle, self._count = [], 0


_open_pools: list[Pool] = []


def _close_all() -> None:
    for pool in [*_open_pools]:
        pool.close()


def _forget_all() -> None:
    for pool in _open_pools:
        pool._forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
