"""Runs the work of a study in processes of their own, some at a time, all forked from one that has imported everything.

Importing torch and transformers takes seconds, as long as a whole run of a small model. multiprocessing's fork server
does it once: each child is a process by itself, which a crash or kill -9 of another one does not touch, and begins in
milliseconds. Children end with the study, however that ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ..errors import TrewError
from . import work

_TRIES = 3
"""How often a run is started whose process was killed, before the study gives up."""
_PATIENCE_S = 60.0
"""Seconds in which children that were asked to stop may finish their step and save it."""


class StudyError(TrewError):
    """A study that cannot go on; what has finished stays."""


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work: a function of ``work`` with its arguments."""

    name: str
    function: Callable[..., dict[str, Any]]
    arguments: Sequence[Any]
    log: Path
    result: Path


class Pool:
    """At most ``jobs`` processes at once. Use as a context: leaving it ends all of them through their own handlers."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._running: dict[Any, tuple[Any, Job, int]] = {}  # sentinel -> process, its job, which try

    @contextmanager
    def open(self) -> Iterator[Pool]:
        with _one_thread():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(list(work.PRELOADED))
            try:
                yield self
            finally:
                self._end()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Starts the jobs in their order, and yields each with its result when it has ended.

        ``jobs`` may be a generator: it is asked for the next one when a process is free. A job whose process was
        killed is started again. Raises StudyError if that happens too often, or if a job ended with an error of trew.
        """
        waiting = iter(jobs)
        more = True
        while more or self._running:
            while more and len(self._running) < self._jobs:
                job = next(waiting, None)
                if job is None:
                    more = False
                else:
                    self._start(job, 1)
            for sentinel in connection.wait(list(self._running)) if self._running else ():
                if (ended := self._ended(sentinel)) is not None:
                    yield ended

    def _start(self, job: Job, attempt: int) -> None:
        job.result.parent.mkdir(parents=True, exist_ok=True)
        # What an earlier process of this job left must not pass for this one's result.
        job.result.unlink(missing_ok=True)
        process = self._context.Process(target=work.child, args=(job.log, job.result, job.function, *job.arguments))
        process.start()
        self._running[process.sentinel] = process, job, attempt

    def _ended(self, sentinel: Any) -> tuple[Job, dict[str, Any]] | None:
        """The job of a process that has ended, with its result; None if it was killed and has been started again."""
        process, job, attempt = self._running.pop(sentinel)
        process.join()
        try:
            found = json.loads(job.result.read_bytes())
        except (OSError, ValueError):
            # Python's own exit code for an uncaught error: another try would end in the same way. Killed processes have
            # others.
            if process.exitcode == 1:
                raise StudyError(
                    f"{job.name}: ended with an error that is not trew's; its output is {job.log}"
                ) from None
            if process.exitcode == work.UNWRITTEN:
                raise StudyError(
                    f"{job.name}: its result, {job.result}, cannot be written; free or mount the disk. The same "
                    "command goes on from here"
                ) from None
            if attempt == _TRIES:
                raise StudyError(
                    f"{job.name}: its process was killed {_TRIES} times (exit code {process.exitcode}), perhaps for "
                    f"want of memory; its output is {job.log}. The same command goes on from here"
                ) from None
            self._start(job, attempt + 1)
            return None
        if "error" in found:
            job.result.unlink()
            raise StudyError(f"{job.name}: {found['error']}")
        return job, found

    def _end(self) -> None:
        # All are asked first, so that they save their work at the same time.
        for process, _, _ in self._running.values():
            process.terminate()
        for process, _, _ in self._running.values():
            process.join(_PATIENCE_S)
            process.kill()
            process.join()
        self._running.clear()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits OpenMP to one thread before anything is forked: a child has none of its parent's other threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
