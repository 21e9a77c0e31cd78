"""Runs users' functions in a separate, killable process. A function that hangs, exits or crashes costs its completions,
not the run, and what it changes (working folder, environment, generators, threads) stays in that process."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RewardError
from ...utils import children
from ..isolation.frames import Closed, Late, WorkerLost
from ..isolation.pool import Pool
from ..isolation.worker import Worker
from .functions import UserFunction
from .packing import packed_calls, unpacked_outcomes
from .session import CallOutcome, Fault, FaultKind, FunctionCall, Spec, took_too_long
from .wire import decode, encode

LOAD_SECONDS = 600.0  # for what the files import: a reward model may be loaded
GRACE_SECONDS = 5.0  # on top of a limit that the event loop in the process enforces


class _FunctionPool(Pool[tuple[bytes, float | None], Any]):
    """The single process of the functions. A restarted one loads everything in ``loaded`` again. ``files`` holds the
    hashes of their files' contents, because a run must not continue with functions that were edited meanwhile."""

    tries = 1  # no second try: a call may have had effects already, such as a request to a server

    def __init__(self, hash_seed: int) -> None:
        super().__init__(size=1)
        self.hash_seed = hash_seed
        self.loaded: list[Spec] = []
        self.files: dict[Path, str] = {}

    def start(self) -> Worker:
        for file, content in self.files.items():
            if _content(file) != content:
                raise RewardError(
                    f"{file}: was changed since it was loaded, and its process had to be started again; put the file "
                    "back as it was, or start a new run"
                )
        # The whole environment: unlike graders, users' functions may need API keys and the like.
        environment = children.environment(PYTHONHASHSEED=str(self.hash_seed))
        serving = "trew.rewards.user.serving"
        return Worker(serving, {}, path=sys.path, environment=environment, stderr=None, guarded=True)

    def greet(self, worker: Worker) -> None:
        for spec in self.loaded:
            again = f"{spec[0]}: could be loaded once, but not again"
            try:
                [found] = self.ask(worker, (encode(["load", [spec]]), LOAD_SECONDS))
            except Late:
                raise RewardError(f"{again}: {_too_slow_to_load()}") from None
            except Closed:
                raise RewardError(f"{again}: {worker.how_it_ended()}") from None
            if "problems" in found:
                raise RewardError(f"{again}: {'; '.join(found['problems'])}")

    def ask(self, worker: Worker, request: tuple[bytes, float | None]) -> Any:
        message, limit = request
        [answer] = worker.ask(message, limit=limit)
        return decode(answer)


def _too_slow_to_load() -> str:
    return f"was not imported within {LOAD_SECONDS:g} s"


def _death(error: Closed) -> str:
    """Describes how the process of the functions ended."""
    # The kernel's out-of-memory killer sends SIGKILL, and leaves no other trace here.
    return f"{error.ended} during the call" + ("; memory may have run out" if "SIGKILL" in error.ended else "")


class Process:
    """A FunctionHost whose functions live in a child process, started on demand and again after it was ended.

    The functions' state (module variables, caches) lives as long as the process. ``hash_seed`` is its PYTHONHASHSEED,
    the same for every start, because the iteration order of sets of strings depends on it. The functions' standard
    output goes to standard error. Safe to use from several threads, one call at a time.
    """

    def __init__(self, *, hash_seed: int = 0) -> None:
        self._pool = _FunctionPool(hash_seed)
        self._lock = threading.RLock()
        self._closing = False

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        """As FunctionHost.load. Reports a file that hangs or ends the process while it is imported."""
        with self._lock:
            loaded: list[UserFunction | tuple[str, ...]] = []
            # One message per file, so that a file that breaks the process does not take the others with it.
            for spec in specs:
                try:
                    [found] = self._ask("load", [spec], limit=LOAD_SECONDS)
                except WorkerLost as error:
                    why = _death(error) if isinstance(error, Closed) else _too_slow_to_load()
                    loaded.append((f"{spec[0]}: {why}",))
                    continue
                if "problems" in found:
                    loaded.append(tuple(found["problems"]))
                    continue
                function = _function(found)
                # Only what loaded: every restart loads this list again, in this order, so that indices stay valid.
                self._pool.loaded.append(spec)
                self._pool.files[function.file] = _content(function.file)
                # What it has imported from its folder decides values as well.
                own = function.sources.items()
                self._pool.files |= {function.file.parent / name: digest for name, digest in own}
                loaded.append(function)
            return loaded

    def call(self, calls: Sequence[FunctionCall], *, step: int = 0) -> list[CallOutcome]:
        """As FunctionHost.call. Limits end sync functions too, by ending the process."""
        with self._lock:
            outcomes: dict[int, CallOutcome] = {}
            # Async functions share one message and so one event loop. Sync ones get a message each: a function that
            # hangs must not cost the results of the others.
            together = [i for i, call in enumerate(calls) if call.function.is_async]
            for i, call in enumerate(calls):
                if i in together:
                    continue
                outcomes[i] = self._one_by_one(call, step) if call.function.verl else self._call([call], step)[0]
            if together:
                outcomes |= zip(together, self._call([calls[i] for i in together], step), strict=True)
            return [outcomes[i] for i in range(len(calls))]

    def grade(self, kind: str, items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[tuple[float | None, str]]:
        """Grades (completion, gold, arguments) with a built-in in the child process; returns scores and statuses."""
        with self._lock:
            return [(score, status) for score, status in self._ask("grade", kind, list(items), limit=LOAD_SECONDS)]

    def close(self) -> None:
        """Ends the process, and with it any call in progress in another thread. The next call starts a new process."""
        self._closing = True
        self._pool.stop()  # before taking the lock: a call in progress may have minutes left
        with self._lock:
            self._closing = False
            self._pool.stop()  # again: the other thread may have started a process between the two

    def _one_by_one(self, call: FunctionCall, step: int) -> CallOutcome:
        """Calls a verl-style function once per completion, each call with the full limit."""
        values: list[float | None] = []
        faults: dict[int, Fault] = {}
        steps = {}
        seconds = 0.0
        for i, sample in enumerate(call.samples):
            [one] = self._call([dataclasses.replace(call, samples=[sample])], step)
            seconds += one.seconds
            values.append(one.values[0] if one.values else None)
            fault = one.whole or one.faults.get(0)
            if fault:
                faults[i] = fault
            if 0 in one.steps:
                steps[i] = one.steps[0]
        return CallOutcome(values, faults, seconds=seconds, steps=steps)

    def _call(self, calls: Sequence[FunctionCall], step: int) -> list[CallOutcome]:
        start = time.perf_counter()
        limits = [call.limit for call in calls]
        # The event loop over there ends async calls at their limits, one by one. Ending the process, which loses all of
        # them, is only for a loop that a function blocks.
        grace = GRACE_SECONDS if calls[0].function.is_async else 0.0
        limit = None if None in limits else max(limits) + grace  # type: ignore[type-var]
        try:
            answers = self._ask("call", *packed_calls(calls), step, limit=limit)
        except Late:
            fault = [Fault("hung", took_too_long(call.function, call.limit), blocked=True) for call in calls]
        except Closed as error:
            kind: FaultKind = "killed" if "SIGKILL" in error.ended else "died"
            fault = [Fault(kind, f"{call.function.who}: {_death(error)}") for call in calls]
        else:
            return unpacked_outcomes(answers)
        return [CallOutcome([], whole=each, seconds=time.perf_counter() - start) for each in fault]

    def _ask(self, *message: Any, limit: float | None) -> Any:
        """Returns the process's answer. Any failure ends the process, since the stream may stop within a message."""
        if self._closing:
            raise RewardError("the process of reward functions is being ended")
        return self._pool.run((encode(message), limit))


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "absent"


# --------------------------------------------------------------------------------------------------------------------
# What travels


def _function(found: Mapping[str, Any]) -> UserFunction:
    made: dict[str, Any] = {**found, "file": Path(found["file"]), "accepts": _set(found["accepts"])}
    return UserFunction(**made)


def _set(names: Any) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
