"""Shares one engine between callers in several threads: one thread drives the engine, and each caller has a view."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .engine import Capabilities, Engine, Finished, Lost, Request

PAUSE_S = 0.02
"""Between two looks at what the engine has finished. Each look wakes threads, which costs more than what they do."""

E = TypeVar("E", bound=Engine)


class WithinSteps:
    """The part of a growing number of seconds that falls into steps, not between them, where an evaluation or a
    checkpoint may be waited for."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._sum = 0.0
        self._since: float | None = None  # None between steps

    def begin(self) -> None:
        """A step begins. One that has failed begins anew, and what it took does not count."""
        self._since = self._seconds()

    def end(self) -> None:
        """The step is done."""
        self._sum, self._since = self._so_far(), None

    def take(self) -> float:
        """The seconds since the last call."""
        taken, self._sum = self._so_far(), 0.0
        if self._since is not None:
            self._since = self._seconds()
        return taken

    def _so_far(self) -> float:
        return self._sum + (0.0 if self._since is None else self._seconds() - self._since)


class SharedEngine(Generic[E]):
    """Makes views of ``engine``, which may be used directly inside :meth:`alone` only.

    The thread that polls it exists from the first request of a view to :meth:`close`. ``idle_s`` counts the seconds in
    which no view had an unfinished request.
    """

    def __init__(self, engine: E) -> None:
        self.engine = engine
        self.changed = threading.Condition()  # of everything here and in the views
        self._views: dict[str, View] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._idle, self._idle_since = 0.0, time.monotonic()

    def view(self, name: str, *, first: bool = False) -> View:
        """A new caller's :class:`.Engine`; names must differ. ``first``: its requests go before those of others."""
        if name in self._views:
            raise ValueError(f"there is a view {name!r} already")
        made = self._views[name] = View(self, name, first=first)
        return made

    @contextlib.contextmanager
    def alone(self) -> Iterator[E]:
        """The engine itself, while all views wait. What it was asked for stays unfinished."""
        with self.changed:
            yield self.engine

    @property
    def idle_s(self) -> float:
        with self.changed:
            return self._idle + (0.0 if self._busy() else time.monotonic() - self._idle_since)

    def close(self) -> None:
        """Drops all requests and ends the thread."""
        with self.changed:
            self._closed = True
            for view in self._views.values():
                view.cancel(list(view.unfinished))
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- for the views, which hold the lock

    def begin(self) -> None:
        """Drives the engine from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trew-engine", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Keeps count of idle time around a block in which requests begin or end."""
        before = self._busy()
        yield
        if not before and self._busy():
            self._idle += time.monotonic() - self._idle_since
        elif before and not self._busy():
            self._idle_since = time.monotonic()

    def _busy(self) -> bool:
        return any(view.unfinished for view in self._views.values())

    def _run(self) -> None:
        with self.changed:
            while not self._closed:
                if not self._busy():
                    self.changed.wait()
                    continue
                # Submitting and ending requests both change whether the engine is idle.
                with self.timed():
                    self._poll()
                self.changed.notify_all()
                self.changed.wait(PAUSE_S)  # the lock is free: others submit, or have the engine alone

    def _poll(self) -> None:
        try:
            # Under the lock, which views need for everything they do.
            # Without patience: whoever waits for the lock must not wait for completions.
            reports = self.engine.poll(0.0)
        except BaseException as error:  # whatever it is, everybody who waits must see it
            for view in self._views.values():
                view.fail(error)
            return
        for report in reports:
            # The view's name in front: names have no colon.
            name, _, own = report.id.partition(":")
            self._views[name].take(dataclasses.replace(report, id=own))


class View:
    """A caller's part of a shared engine: an :class:`.Engine` with its own requests and reports."""

    def __init__(self, shared: SharedEngine[Any], name: str, *, first: bool) -> None:
        self.capabilities: Capabilities = shared.engine.capabilities
        self._shared, self._name, self._first = shared, name, first
        self.unfinished: set[str] = set()
        self._reports: list[Finished | Lost] = []
        self._error: BaseException | None = None

    @property
    def version(self) -> int:
        return self._shared.engine.version

    @version.setter
    def version(self, version: int) -> None:
        with self._shared.changed:
            self._shared.engine.version = version

    def submit(self, requests: Sequence[Request]) -> None:
        own = [dataclasses.replace(r, id=f"{self._name}:{r.id}", first=self._first) for r in requests]
        with self._shared.changed, self._shared.timed():
            self._shared.engine.submit(own)
            self.unfinished |= {r.id for r in requests}
            self._shared.begin()

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._reports or self._error or not self.unfinished, timeout_s)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            reports, self._reports = self._reports, []
            return reports

    def cancel(self, ids: Sequence[str]) -> None:
        dropped = set(ids)
        with self._shared.changed, self._shared.timed():
            self._shared.engine.cancel([f"{self._name}:{each}" for each in dropped])
            self.unfinished -= dropped
            self._reports = [report for report in self._reports if report.id not in dropped]

    def state(self) -> dict[str, Any]:
        with self._shared.changed:
            return self._shared.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._shared.changed:
            self._shared.engine.load_state(state)

    # ---- from the thread that drives the engine

    def take(self, report: Finished | Lost) -> None:
        self.unfinished.discard(report.id)
        self._reports.append(report)

    def fail(self, error: BaseException) -> None:
        """The engine has dropped all requests."""
        # A view without requests has lost nothing, and its caller nothing to hear.
        if self.unfinished:
            self._error, self._reports = error, []
            self.unfinished.clear()
