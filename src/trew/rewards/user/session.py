"""Calls users' functions, sync and async, and reports results or faults as plain values.

Functions are loaded into a session and keep their state there. A session cannot end a sync function that never returns,
so ``process`` runs a session in a killable process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from ...errors import ConfigError, RewardError
from ...utils.preserved import importable, preserved_state
from ...utils.user_files import describe, where
from ..steps import are_steps, mean_of_steps, parse_steps
from . import functions
from .functions import Sample, UserFunction
from .returned import as_list, as_number, discard, verl_score

Spec = tuple[str, Mapping[str, Any]]
"""``path/to/file.py:function`` and its arguments."""

FaultKind = Literal["raised", "value", "returned", "hung", "died", "killed"]
"""``raised``: an exception. ``value``: one completion's value is not a finite number. ``returned``: not one value per
completion. ``hung``: it did not return in time. ``died``: it ended its process. ``killed``: something else ended the
process, for instance the system when memory ran out."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong in a call. ``text`` is a full message but for the sample; ``trace`` is the traceback, if any.
    ``blocked`` says that it blocked the event loop, so that no other call could run meanwhile."""

    kind: FaultKind
    text: str
    trace: str = ""
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One function, the completions it judges, and its limit in seconds (None: no limit)."""

    function: UserFunction
    samples: Sequence[Sample]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of a call: one value per completion, None for those in ``faults`` (by index). If the call failed as a
    whole, ``whole`` is set and there are no values. ``steps`` holds the (end, value) pairs of completions whose steps
    were scored."""

    values: list[float | None]
    faults: dict[int, Fault] = field(default_factory=dict)
    whole: Fault | None = None
    seconds: float = 0.0
    steps: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)


class FunctionHost(Protocol):
    """Where functions live: a Session, or a Process with a session in it."""

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        """Loads functions; returns for each its description, or all its problems."""
        ...

    def call(self, calls: Sequence[FunctionCall], *, step: int = 0) -> list[CallOutcome]:
        """Calls functions that were loaded here: sync ones in turn, async ones concurrently."""
        ...

    def close(self) -> None: ...


class Session:
    """A FunctionHost within this process: used inside ``Process``'s child, in tests, and under a debugger."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}  # a file is run once, so that its functions share their module
        self._functions: list[Callable[..., Any]] = []

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        loaded: list[UserFunction | tuple[str, ...]] = []
        for spec, args in specs:
            try:
                described, function = functions.load(spec, args, self._modules, index=len(self._functions))
            except ConfigError as error:
                loaded.append(error.problems)
                continue
            self._functions.append(function)
            loaded.append(described)
        return loaded

    def call(self, calls: Sequence[FunctionCall], *, step: int = 0) -> list[CallOutcome]:
        """As FunctionHost.call. Restores process-wide state afterwards. Limits end async functions only."""
        with preserved_state(), contextlib.ExitStack() as stack:
            for folder in dict.fromkeys(call.function.file.parent for call in calls):
                stack.enter_context(importable(folder))
            # Sync functions have finished after this line; async ones have only returned their coroutines.
            begun = [self._begin(call, step) for call in calls]
            waiting = [(i, raw, calls[i].limit) for i, (raw, _) in enumerate(begun) if isinstance(raw, Awaitable)]
            ended = _run_together([(raw, limit) for _, raw, limit in waiting])
            for (i, _, _), (raw, seconds) in zip(waiting, ended, strict=True):
                begun[i] = (raw, begun[i][1] + seconds)
            return [_outcome(call, raw, seconds) for call, (raw, seconds) in zip(calls, begun, strict=True)]

    def close(self) -> None:
        pass

    def _begin(self, call: FunctionCall, step: int) -> tuple[Any, float]:
        """Makes a call; returns its raw result (an awaitable if the function is async) and the seconds it took."""
        start, function = time.perf_counter(), self._functions[call.function.index]
        if not call.samples:
            return [], 0.0
        if call.function.verl:
            # s=s binds each sample to its own lambda.
            raw: Any = [_tried(lambda s=s: call.function.call_one(function, s)) for s in call.samples]
            raw = _each(raw, call.limit) if any(map(inspect.isawaitable, raw)) else raw
        else:
            raw = _tried(lambda: call.function.call(function, call.samples, step=step))
        return raw, time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException
    in_time: bool = True


def _tried(action: Callable[[], Any]) -> Any:
    """Returns the result of ``action``, or any failure as a value: a function's SystemExit or KeyboardInterrupt is its
    own failure, not the run's."""
    try:
        return action()
    except BaseException as error:
        return _Failed(error)


async def _limited(awaitable: Awaitable[Any], limit: float | None) -> tuple[Any, float]:
    start, scope = time.perf_counter(), asyncio.timeout(limit)
    try:
        async with scope:
            value = await awaitable
    # The scope distinguishes our limit from a TimeoutError that the function raised itself.
    except BaseException as error:
        value = _Failed(error, in_time=not scope.expired())
    return value, time.perf_counter() - start


async def _each(values: Sequence[Any], limit: float | None) -> list[Any]:
    """Awaits an async verl-style function: one coroutine per completion, concurrently, each with the full limit."""

    async def one(value: Any) -> Any:
        return (await _limited(value, limit))[0] if inspect.isawaitable(value) else value

    return list(await asyncio.gather(*map(one, values)))


def _run_together(waiting: Sequence[tuple[Awaitable[Any], float | None]]) -> list[tuple[Any, float]]:
    """Runs awaitables concurrently, each up to its limit; returns results and seconds.

    In a thread whose event loop already runs (a notebook), uses a new thread.
    """
    if not waiting:
        return []

    async def together() -> list[tuple[Any, float]]:
        return list(await asyncio.gather(*(_limited(awaitable, limit) for awaitable, limit in waiting)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    # asyncio.run refuses to start in a thread whose loop is running.
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(together())), name="trew-rewards")
    thread.start()
    thread.join()
    return outcome[0]


def _outcome(call: FunctionCall, raw: Any, seconds: float) -> CallOutcome:
    """Validates what a call returned."""
    function, samples = call.function, call.samples
    if isinstance(raw, _Failed):
        return CallOutcome([], whole=_fault(call, raw), seconds=seconds)
    try:
        entries = as_list(raw, count=len(samples), who=function.who)
    except RewardError as error:
        return CallOutcome([], whole=Fault("returned", str(error)), seconds=seconds)
    read = verl_score if function.verl else as_number
    values: list[float | None] = []
    faults: dict[int, Fault] = {}
    steps: dict[int, tuple[tuple[int, float], ...]] = {}
    # One bad entry costs its own completion only; a result of the wrong length, above, costs the call.
    for i, (entry, sample) in enumerate(zip(entries, samples, strict=True)):
        values.append(None)  # until the entry has been read
        if isinstance(entry, _Failed):
            faults[i] = _fault(call, entry)
            continue
        try:
            if are_steps(entry):
                steps[i] = parse_steps(entry, length=sample.length, who=function.who, sample=str(sample))
                values[i] = mean_of_steps(steps[i])
            else:
                values[i] = read(entry, who=function.who, sample=str(sample))
        except RewardError as error:
            faults[i] = Fault("value", str(error))
            discard(entry)
    return CallOutcome(values, faults, seconds=seconds, steps=steps)


def _fault(call: FunctionCall, failed: _Failed) -> Fault:
    if not failed.in_time:
        return Fault("hung", took_too_long(call.function, call.limit))
    error, function = failed.error, call.function
    place = f"reward {function.name!r} ({where(error, function.file)}) raised {describe(error)}"
    return Fault("raised", place, "".join(traceback.format_exception(error)))


def took_too_long(function: UserFunction, limit: float | None) -> str:
    return f"{function.who} did not return within {limit:g} s"
