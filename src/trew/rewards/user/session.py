"""Calls users' functions, sync and async, and says what each gave, or what went wrong with it, as plain values.

A session is where functions are loaded and keep their own state. It cannot end a sync function that never returns:
``process`` runs one in a process that can be ended.
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
from ..steps import are_steps, mean_of_steps, parse_steps
from . import functions
from .functions import Sample, UserFunction
from .loading import describe, where
from .preserved import importable, preserved_state
from .returned import as_list, as_number, discard, verl_score

Spec = tuple[str, Mapping[str, Any]]
"""``path/to/file.py:function`` and its arguments."""

FaultKind = Literal["raised", "value", "returned", "hung", "died", "killed"]
"""``raised``: an exception. ``value``: one completion's value is no finite number. ``returned``: not one value per
completion. ``hung``: it did not return in time. ``died``: it took its process down. ``killed``: somebody else did, for
instance the system when memory ran out."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong in a call; ``text`` is complete but for the sample, ``trace`` is its traceback if any.
    ``blocked``: it hung in a way that nothing else could run beside it."""

    kind: FaultKind
    text: str
    trace: str = ""
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One function with the completions it is to judge, and the seconds it may take (None: any)."""

    function: UserFunction
    samples: Sequence[Sample]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: a value per completion, those of ``faults`` (by completion) aside; or ``whole``, where the call
    as a whole failed, and no values. ``steps`` has the (end, value) of completions whose steps were scored."""

    values: list[float | None]
    faults: dict[int, Fault] = field(default_factory=dict)
    whole: Fault | None = None
    seconds: float = 0.0
    steps: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)


class Runner(Protocol):
    """Where functions live: a Session, or a Process with a session in it."""

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        """Loads functions; for each its description, or all that is wrong with it."""
        ...

    def call(self, calls: Sequence[Call], *, step: int = 0) -> list[Outcome]:
        """Calls functions that were loaded here: sync ones one after another, async ones together."""
        ...

    def close(self) -> None: ...


class Session:
    """A Runner in this very process: for the process of the functions itself, for tests, and for a debugger."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}
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

    def call(self, calls: Sequence[Call], *, step: int = 0) -> list[Outcome]:
        """As Runner.call. Process-wide state that functions change is put back. Limits end async functions only."""
        with preserved_state(), contextlib.ExitStack() as stack:
            for folder in dict.fromkeys(call.function.file.parent for call in calls):
                stack.enter_context(importable(folder))
            begun = [self._begin(call, step) for call in calls]
            waiting = [(i, raw, calls[i].limit) for i, (raw, _) in enumerate(begun) if isinstance(raw, Awaitable)]
            ended = _run_together([(raw, limit) for _, raw, limit in waiting])
            for (i, _, _), (raw, seconds) in zip(waiting, ended, strict=True):
                begun[i] = (raw, begun[i][1] + seconds)
            return [_outcome(call, raw, seconds) for call, (raw, seconds) in zip(calls, begun, strict=True)]

    def close(self) -> None:
        pass

    def _begin(self, call: Call, step: int) -> tuple[Any, float]:
        """The raw result of a call (something to await, of an async function) and the seconds it took."""
        start, function = time.perf_counter(), self._functions[call.function.index]
        if not call.samples:
            return [], 0.0
        if call.function.verl:
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
    """What ``action`` gives; a failure as a value, whatever it is: exits and interrupts of a function's own are its
    failures too, not those of the run."""
    try:
        return action()
    except BaseException as error:
        return _Failed(error)


async def _limited(awaitable: Awaitable[Any], limit: float | None) -> tuple[Any, float]:
    start, scope = time.perf_counter(), asyncio.timeout(limit)
    try:
        async with scope:
            value = await awaitable
    except BaseException as error:
        value = _Failed(error, in_time=not scope.expired())
    return value, time.perf_counter() - start


async def _each(values: Sequence[Any], limit: float | None) -> list[Any]:
    """verl's form, async: one coroutine per completion, together, each with the limit of a call."""

    async def one(value: Any) -> Any:
        return (await _limited(value, limit))[0] if inspect.isawaitable(value) else value

    return list(await asyncio.gather(*map(one, values)))


def _run_together(waiting: Sequence[tuple[Awaitable[Any], float | None]]) -> list[tuple[Any, float]]:
    """Results and seconds of all awaitables, run concurrently, each at most its limit.

    Works from a thread whose event loop is already running (a notebook) as well: then in a thread of its own.
    """
    if not waiting:
        return []

    async def together() -> list[tuple[Any, float]]:
        return list(await asyncio.gather(*(_limited(awaitable, limit) for awaitable, limit in waiting)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(together())), name="trew-rewards")
    thread.start()
    thread.join()
    return outcome[0]


def _outcome(call: Call, raw: Any, seconds: float) -> Outcome:
    """What was returned, checked."""
    function, samples = call.function, call.samples
    if isinstance(raw, _Failed):
        return Outcome([], whole=_fault(call, raw), seconds=seconds)
    try:
        entries = as_list(raw, count=len(samples), who=function.who)
    except RewardError as error:
        return Outcome([], whole=Fault("returned", str(error)), seconds=seconds)
    read = verl_score if function.verl else as_number
    values: list[float | None] = []
    faults: dict[int, Fault] = {}
    steps: dict[int, tuple[tuple[int, float], ...]] = {}
    for i, (entry, sample) in enumerate(zip(entries, samples, strict=True)):
        values.append(None)
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
    return Outcome(values, faults, seconds=seconds, steps=steps)


def _fault(call: Call, failed: _Failed) -> Fault:
    if not failed.in_time:
        return Fault("hung", took_too_long(call.function, call.limit))
    error, function = failed.error, call.function
    place = f"reward {function.name!r} ({where(error, function.file)}) raised {describe(error)}"
    return Fault("raised", place, "".join(traceback.format_exception(error)))


def took_too_long(function: UserFunction, limit: float | None) -> str:
    return f"{function.who} did not return within {limit:g} s"
