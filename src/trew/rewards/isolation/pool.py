"""A bounded pool of worker processes: starts them on demand, replaces broken ones, and starts afresh after a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from .frames import Closed, WorkerLost
from .worker import Worker

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(ABC, Generic[Request, Answer]):
    """Workers of one kind. ``run`` may be called from any thread.

    A subclass says how a worker starts (``start``), what is exchanged first (``greet``), how a request is made
    (``ask``), and what the answer is after ``tries`` failures in a row (``lost``). A worker that fails or whose call
    was interrupted is ended: its late answer would be taken for the answer to the next request.
    """

    tries = 2

    def __init__(self, *, size: int):
        self.size = size
        self._reset()
        self._closed = False
        _pools.add(self)

    @abstractmethod
    def start(self) -> Worker:
        """Starts a worker."""

    @abstractmethod
    def greet(self, worker: Worker) -> None:
        """Exchanges what a new worker needs before its first request; raises WorkerLost if the worker is unusable."""

    @abstractmethod
    def ask(self, worker: Worker, request: Request) -> Answer:
        """Returns the worker's answer; raises WorkerLost if there is none."""

    def lost(self, error: WorkerLost) -> Answer:
        """Returns the answer to give when every try failed; ``error`` is the last failure."""
        raise error

    def run(self, request: Request) -> Answer:
        """Waits for a free worker and returns its answer. Raises RuntimeError once the pool is closed."""
        error = WorkerLost("not tried")
        with self._slots:
            for number in range(self.tries):
                try:
                    return self._once(request, fresh=number > 0)
                except WorkerLost as why:
                    error = why
        return self.lost(error)

    def run_many(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers in the order of ``requests``, using all workers at once."""
        return run_together(self.run, requests, size=self.size)

    def stop(self) -> None:
        """Ends all workers; calls in progress fail. Later calls start new workers."""
        for worker in [*self._busy]:
            worker.kill()
        self._end_idle()

    def close(self) -> None:
        """Ends all workers for good; busy ones end after their current call."""
        self._closed = True
        self._end_idle()

    def _once(self, request: Request, *, fresh: bool) -> Answer:
        if self._closed:
            raise RuntimeError("the pool is closed")
        worker, is_new = self._take(fresh=fresh)
        self._busy.add(worker)
        try:
            if is_new:
                self.greet(worker)
            answer = self.ask(worker, request)
        # BaseException: after a KeyboardInterrupt, too, an answer may be in flight (see the class docstring).
        except BaseException as error:
            # Before the kill, which would replace the cause of death by its own signal.
            if isinstance(error, Closed):
                error.ended = worker.how_it_ended()
            worker.kill()
            worker.end()
            raise
        finally:
            self._busy.discard(worker)
        self._idle.append(worker)
        if self._closed:  # closed during this call: close() may have emptied the idle list before this append
            self._end_idle()
        return answer

    def _take(self, *, fresh: bool) -> tuple[Worker, bool]:
        """Returns a worker and whether it is new."""
        # list.pop and list.append are atomic, so the idle list needs no lock between threads.
        with contextlib.suppress(IndexError):
            worker = self._idle.pop()
            if not fresh:
                return worker, False
            worker.end()  # whatever broke the last one (memory ran out) may have broken this one too
        return self.start(), True

    def _end_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().end()

    def _reset(self) -> None:
        self._slots = threading.BoundedSemaphore(self.size)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()

    def _forget(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.forget()
        self._reset()  # a slot may be held by a thread that does not exist after the fork


def run_together(function: Callable[[Item], Result], items: Sequence[Item], *, size: int) -> list[Result]:
    """Returns ``[function(item) for item in items]``, computed by ``size`` threads that end with the call."""
    if len(items) < 2 or size < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(size, len(items)), thread_name_prefix="trew-pool") as threads:
        return list(threads.map(function, items))


def workers() -> int:
    """Returns the default number of workers of a pool: all processors but two, which the run itself needs; on a
    small machine up to two.

    >>> 1 <= workers() <= processors()
    True
    """
    return max(processors() - 2, min(processors(), 2))


def processors() -> int:
    """Returns how many processors this process may use."""
    # The affinity mask, not os.cpu_count(): schedulers pin a job to a share of a large machine.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


_pools: weakref.WeakSet[Pool[Any, Any]] = weakref.WeakSet()


def _forget_all(pools: Iterable[Pool[Any, Any]] = _pools) -> None:
    for pool in [*pools]:
        pool._forget()


# Parent and child would otherwise read from the same pipes, and each could get the other's answer.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
