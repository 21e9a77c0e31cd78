"""Up to so many workers of one kind: started when needed, fed, ended when they break, closed at exit, left to the
parent after a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from .frames import Closed, Lost
from .worker import Worker

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(Generic[Request, Answer]):
    """Workers of one kind. ``run`` may be called from any thread.

    A kind says how a worker is started (``start``) and what it must be told first (``greet``), how it is asked
    (``ask``), and what the answer is where it breaks ``tries`` times in a row (``lost``). A worker that breaks, and one
    whose call was interrupted, is ended: the answer to that call could still be on its way, and nothing can follow.
    """

    tries = 2

    def __init__(self, *, size: int):
        self.size = size
        self._reset()
        self._closed = False
        _pools.add(self)

    def start(self) -> Worker:
        """A new worker."""
        raise NotImplementedError

    def greet(self, worker: Worker) -> None:
        """What has to pass between the two before the first request; raises Lost where the worker is not fit for it."""
        raise NotImplementedError

    def ask(self, worker: Worker, request: Request) -> Answer:
        """The worker's answer; raises Lost where there is none."""
        raise NotImplementedError

    def lost(self, error: Lost) -> Answer:
        """The answer where every try ended in an error, of which this is the last."""
        raise error

    def run(self, request: Request) -> Answer:
        """The answer; waits for a worker to be free. Raises RuntimeError once the pool is closed."""
        error = Lost("not tried")
        with self._slots:
            for number in range(self.tries):
                try:
                    return self._once(request, fresh=number > 0)
                except Lost as why:
                    error = why
        return self.lost(error)

    def run_many(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers in the order of ``requests``, as many at once as there are workers."""
        return run_together(self.run, requests, size=self.size)

    def stop(self) -> None:
        """Ends all workers, those at work too, whose calls fail; later calls start others."""
        for worker in [*self._busy]:
            worker.kill()
        self._end_idle()

    def close(self) -> None:
        """Ends all workers for good; those at work end when their call does."""
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
        except BaseException as error:
            if isinstance(error, Closed):
                error.ended = worker.how_it_ended()
            worker.kill()
            worker.end()
            raise
        finally:
            self._busy.discard(worker)
        self._idle.append(worker)
        if self._closed:  # meanwhile: whoever closed it may have looked before this worker was back
            self._end_idle()
        return answer

    def _take(self, *, fresh: bool) -> tuple[Worker, bool]:
        """A worker, and whether it has just been started."""
        with contextlib.suppress(IndexError):
            worker = self._idle.pop()
            if not fresh:
                return worker, False
            worker.end()  # what broke the last one (memory ran out) may have broken this one too
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
        self._reset()  # a thread that is not there any more may have held a slot


def run_together(function: Callable[[Item], Result], items: Sequence[Item], *, size: int) -> list[Result]:
    """``[function(item) for item in items]`` with ``size`` threads, which end with the call."""
    if len(items) < 2 or size < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(size, len(items)), thread_name_prefix="trew-pool") as threads:
        return list(threads.map(function, items))


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


_pools: weakref.WeakSet[Pool[Any, Any]] = weakref.WeakSet()


def _forget_all(pools: Iterable[Pool[Any, Any]] = _pools) -> None:
    for pool in [*pools]:
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
