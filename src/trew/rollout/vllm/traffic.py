"""Sends requests to servers from an event loop in a separate thread, and detects servers that hang."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import httpx2

from .client import CONNECT_S, REUSED_S, ServerHung, answer, failure, headers, wire
from .endpoint import Endpoint

GENERATE = "/inference/v1/generate"
_TOKENS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
"""Matches the token counters in a server's metrics: one line for each of its engines."""
CLOSE_S = 5.0
"""Seconds that cancelled requests and connections may take to end."""
LOOK_S = 1.0
"""Seconds between two readings of a server's counters: a hung server is detected within twice this of its limit."""


class Traffic:
    """Sends requests and collects answers. The thread exists from the first :meth:`send` to :meth:`stop`.

    ``hang_s``: a server that generates no token for any of its requests for this many seconds has hung. Its requests
    fail with :class:`.ServerHung`. Health routes do not show it: an API process answers while its engine hangs.
    """

    def __init__(self, *, hang_s: float) -> None:
        self.hang_s = hang_s
        self.answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self.paused: set[Endpoint] = set()  # servers that make no progress because their weights change
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lines: dict[Endpoint, _Line] = {}
        self._futures: dict[object, Future[None]] = {}

    def send(self, key: object, endpoint: Endpoint, body: dict[str, Any], *, path: str = GENERATE) -> None:
        """Starts a request. ``answers`` gets (key, JSON or exception) at its end, unless it is dropped."""
        loop = self._running()
        self._futures[key] = asyncio.run_coroutine_threadsafe(self._carry(key, endpoint, body, path), loop)

    def drop(self, key: object) -> None:
        """Cancels a request and closes its connection, so that the server stops working on it."""
        if (future := self._futures.pop(key, None)) is not None:
            future.cancel()

    def taken(self, key: object) -> None:
        """Forgets a request whose answer was taken from ``answers``."""
        self._futures.pop(key, None)

    def stop(self) -> None:
        """Drops all requests and ends the thread."""
        if self._thread is None or self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        # A daemon that does not end costs its connections; waiting for it would cost the run.
        self._thread.join(3 * CLOSE_S)
        self._thread = self._loop = None
        self._futures, self.answers = {}, SimpleQueue()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(report_unless_late)
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="trew-requests", daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    async def _carry(self, key: object, endpoint: Endpoint, body: dict[str, Any], path: str) -> None:
        line = self._lines.get(endpoint)
        if line is None:
            line = self._lines[endpoint] = _Line(endpoint, self)
        # Kept from before the wait: stop() makes another queue, which a late answer must not reach.
        answers = self.answers
        try:
            answers.put((key, await line.ask(body, path)))
        except Exception as error:  # any error must reach the thread that waits for this answer
            answers.put((key, error))

    async def _end(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        try:
            for task in tasks:
                task.cancel()
            if tasks:
                # A connection that breaks at this moment may lose its cancellation: wait for a limited time.
                await asyncio.wait(tasks, timeout=CLOSE_S)
            closing = [asyncio.ensure_future(line.client.aclose()) for line in self._lines.values()]
            if closing:
                await asyncio.wait(closing, timeout=CLOSE_S)
            for task in closing:
                if task.done() and not task.cancelled():
                    task.exception()  # that a broken connection cannot be closed is no news
            self._lines = {}
        finally:
            asyncio.get_running_loop().stop()


class _Line:
    """The requests to one server."""

    def __init__(self, endpoint: Endpoint, traffic: Traffic) -> None:
        self.endpoint, self.traffic = endpoint, traffic
        every = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=REUSED_S)
        self.client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(**wire(endpoint), limits=every), headers=headers(endpoint),
            trust_env=False,
            # The time of an answer depends on its length and the queue before it: only progress has a limit.
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
        )  # fmt: skip
        self.open: set[asyncio.Task[Any]] = set()
        self.watcher: asyncio.Task[None] | None = None
        self.moved = 0.0  # when a token was last seen
        # Requests that the watcher gave up. Not one flag for the line: a request that is sent while they end must not
        # change what they report.
        self.hung: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    async def ask(self, body: dict[str, Any], path: str) -> Any:
        """Returns the server's answer. Raises ServerGone or ServerRefused."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        if self.watcher is None or self.watcher.done():
            # Counted anew with the first request of a busy time: an idle server generates nothing.
            self.moved = _now()
            self.watcher = asyncio.ensure_future(self._watch())
        try:
            response = await self.client.post(f"{self.endpoint.url}{path}", json=body)
            self.moved = _now()
            return answer(self.endpoint, _name(path), response)
        except (httpx2.HTTPError, OSError) as error:
            raise failure(self.endpoint, _name(path), error) from None
        except asyncio.CancelledError:
            # A request that was dropped by its caller was cancelled as well.
            if task not in self.hung:
                raise
            raise ServerHung(
                f"server {self.endpoint}: no new token for {self.traffic.hang_s:g} s (cluster.request_timeout_s)"
            ) from None
        finally:
            self.open.discard(task)

    async def _watch(self) -> None:
        """Cancels all requests once the server has generated no token for ``hang_s``."""
        often, before = min(LOOK_S, self.traffic.hang_s / 4), None
        while self.open:
            await asyncio.sleep(min(often, max(self._left(), 0.0)))
            # A metrics route that does not answer must not delay the decision; a slow one must not cause it.
            found = await self._tokens(min(2 * often, max(self._left(), often / 2)))
            if self.endpoint in self.traffic.paused or (found is not None and found != before):
                self.moved = _now()
            before = before if found is None else found
            if self._left() <= 0:
                self._give_up()
                return

    def _give_up(self) -> None:
        """Ends all requests with ServerHung."""
        for task in list(self.open):
            self.hung.add(task)
            task.cancel()

    def _left(self) -> float:
        """Seconds until the server counts as hung."""
        return self.traffic.hang_s - (_now() - self.moved)

    async def _tokens(self, timeout_s: float) -> float | None:
        """Returns the number of tokens that the server has read and generated; None if it does not report it."""
        # Whatever goes wrong: without this watcher nobody would notice that the server hangs.
        with contextlib.suppress(Exception):
            response = await self.client.get(f"{self.endpoint.url}/metrics", timeout=timeout_s)
            if found := _TOKENS.findall(response.content):
                return sum(map(float, found))
        return None


def report_unless_late(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles errors of callbacks in an event loop as asyncio does, except one that means nothing.

    anyio has a Unix socket set the result of a future as soon as it can be read. Where the request that waits for this
    is cancelled in the same pass of the loop, the future is done already, and asyncio would print a traceback."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


def _name(path: str) -> str:
    """A request in messages: "generate", "completions"."""
    return path.rpartition("/")[2]


def _now() -> float:
    return asyncio.get_running_loop().time()
