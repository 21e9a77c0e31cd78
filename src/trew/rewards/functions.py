"""Rewards that users write: one function in a file, in the signature of TRL or of verl, sync or async.

TRL: ``f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`` is called once with all
completions of a step. verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` is called per
completion. The form is recognised by the parameters' names, and a function gets only the keywords that it accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import ConfigError, RewardError, nearest
from ..types import Prompt
from .builtin import first_column
from .isolation import importable, preserved_state
from .loading import describe, load_function, where
from .returned import as_list, as_number, discard, verl_score
from .verdict import shown

OFFERED = ("prompts", "completions", "completion_ids", "trainer_state")  # by us, in TRL's form
NOT_OFFERED = ("log_extra", "log_metric", "environments")  # TRL's trainer has them; here they must have defaults
SEARCH_SECONDS = 10.0  # spent on finding the sample that made a function raise
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a function sees it."""

    prompt: Prompt
    text: str
    token_ids: Iterable[int]  # (T,)

    def __str__(self) -> str:
        return f"prompt {self.prompt.uid!r}, completion {shown(self.text)!r}"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A loaded function. ``accepts`` is None when it takes any keyword; ``required`` are columns it cannot do without;
    ``positional`` are parameters that can only be given by position."""

    function: Callable[..., Any]
    name: str
    file: Path
    args: Mapping[str, Any]
    verl: bool
    accepts: frozenset[str] | None
    required: tuple[str, ...]
    positional: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        return f"reward {self.name!r} ({self.file})"

    def applies(self, prompt: Prompt) -> bool:
        """Whether the row has what the function cannot do without."""
        if self.verl:
            return first_column(prompt.columns) is not None
        return all(name in prompt.columns for name in self.required)

    def missing(self, columns: Iterable[str]) -> str:
        """What the function needs and ``columns``, of all rows together, do not have; empty when nothing."""
        columns = list(columns)
        have = ", ".join(sorted(columns)) or "none"
        if self.verl:
            return f"needs a gold answer, which no row has; columns: {have}"
        absent = [name for name in self.required if name not in columns]
        close = nearest(absent[0], columns) if absent else ""
        return f"needs column {', '.join(map(repr, absent))}{close}, which no row has; columns: {have}"

    def invoke(self, samples: Sequence[Sample], *, step: int) -> Any:
        """Calls the function; the result is raw, and may be something to await. Its own errors come through."""
        if self.verl:
            return [self._call(self._verl_keywords(sample)) for sample in samples]
        return self._call(self._trl_keywords(samples, step))

    def _call(self, keywords: dict[str, Any]) -> Any:
        if self.accepts is not None:
            keywords = {name: value for name, value in keywords.items() if name in self.accepts}
        leading = [keywords.pop(name) for name in self.positional if name in keywords]
        return self.function(*leading, **keywords)

    def _trl_keywords(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        names = dict.fromkeys(name for sample in samples for name in sample.prompt.columns)
        columns = {n: [s.prompt.columns.get(n) for s in samples] for n in names if n not in OFFERED and n != "prompt"}
        return {
            **columns,
            "prompts": [_as_prompt(s.prompt) for s in samples],
            "completions": [_as_completion(s) for s in samples],
            "completion_ids": [[int(t) for t in s.token_ids] for s in samples],
            "trainer_state": SimpleNamespace(global_step=step),
            **self.args,
        }

    def _verl_keywords(self, sample: Sample) -> dict[str, Any]:
        columns = sample.prompt.columns
        return {
            "data_source": columns.get("data_source") or "",
            "solution_str": sample.text,
            "ground_truth": first_column(columns, ("ground_truth", "gold", "answer")),
            "extra_info": dict(columns.get("extra_info") or {}),
            **self.args,
        }


def _as_prompt(prompt: Prompt) -> Any:
    return prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]


def _as_completion(sample: Sample) -> Any:
    return sample.text if sample.prompt.messages is None else [{"role": "assistant", "content": sample.text}]


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(spec: str, args: Mapping[str, Any], modules: dict[Path, ModuleType] | None = None) -> UserFunction:
    """``path/to/file.py:function`` with its keyword arguments; raises ConfigError with every problem found."""
    function, path, name = load_function(spec, modules)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{path}:{name}: its parameters cannot be read; wrap it in a plain def") from None
    kinds = inspect.Parameter
    named = {n: p for n, p in parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    verl = {"solution_str", "ground_truth"} <= set(named)
    offered = VERL if verl else OFFERED
    problems = []
    for key in args:
        if key in offered:
            problems.append(f"args.{key}: is given by trew in every call; leave it out")
        elif key not in named and not any_keyword:
            settable = [n for n in named if n not in offered]
            takes = f"it takes {', '.join(settable)}" if settable else "it takes no arguments of its own"
            problems.append(f"args.{key}: {name}() has no such parameter{nearest(key, settable)}; {takes}")
    needed = [n for n, p in named.items() if p.default is kinds.empty and n not in args]
    if not verl and "completions" not in named and not any_keyword:
        problems.append(
            f"{name}({', '.join(parameters)}) takes neither `completions` (TRL: f(prompts, completions, **columns)) "
            "nor `solution_str` and `ground_truth` "
            "(verl: compute_score(data_source, solution_str, ground_truth, extra_info))"
        )
    elif verl:
        problems += [
            f"{name}() needs {n!r}, which verl's form does not have; give it under args"
            for n in needed
            if n not in VERL
        ]
    else:
        problems += [
            f"{name}() needs {n!r}, which only TRL's trainer has; give it the default None"
            for n in needed
            if n in NOT_OFFERED
        ]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return UserFunction(
        function=function,
        name=name,
        file=path,
        args=dict(args),
        verl=verl,
        accepts=None if any_keyword else frozenset(named),
        required=("ground_truth",) if verl else tuple(n for n in needed if n not in OFFERED),
        positional=tuple(n for n, p in named.items() if p.kind is kinds.POSITIONAL_ONLY),
    )


# --------------------------------------------------------------------------------------------------------------------
# Calling


@dataclass(frozen=True, slots=True)
class Returned:
    """What one function gave for its samples, checked, and how long it took in all."""

    values: list[float | None]
    seconds: float


def call_all(calls: Sequence[tuple[UserFunction, Sequence[Sample]]], *, step: int = 0) -> list[Returned]:
    """Calls every function with its samples: sync ones one after another, async ones together on one event loop.

    Process-wide state that they change is put back. Raises RewardError, naming function and sample, when one raises
    or returns something else than one finite number or None per completion.
    """
    with preserved_state(), contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(function.file.parent for function, _ in calls):
            stack.enter_context(importable(folder))
        results: list[tuple[Any, float]] = []
        pending: dict[int, Awaitable[Any]] = {}
        for i, (function, samples) in enumerate(calls):
            start = time.perf_counter()
            try:
                raw = function.invoke(samples, step=step) if samples else []
            except (Exception, SystemExit) as error:
                discard([*pending.values(), *(earlier for earlier, _ in results)])
                raise _raised(function, samples, error, step) from error
            results.append((raw, time.perf_counter() - start))
            if inspect.isawaitable(raw):
                pending[i] = raw
            elif function.verl and any(map(inspect.isawaitable, raw)):
                pending[i] = _each(raw)
        if pending:
            for i, (value, seconds) in zip(pending, run_together(list(pending.values())), strict=True):
                results[i] = (value, results[i][1] + seconds)
        checked = []
        for (function, samples), (raw, seconds) in zip(calls, results, strict=True):
            if isinstance(raw, _Failed):
                raise _raised(function, samples, raw.error, step) from raw.error
            checked.append(Returned(_checked(function, samples, raw), seconds))
        return checked


def _checked(function: UserFunction, samples: Sequence[Sample], raw: Any) -> list[float | None]:
    read = verl_score if function.verl else as_number
    values = as_list(raw, count=len(samples), who=function.who)
    try:
        return [read(v, who=function.who, sample=str(s)) for v, s in zip(values, samples, strict=True)]
    except RewardError:
        discard(values)
        raise


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, float]]:
    """Results and seconds of all ``awaitables``, run concurrently; one that raises gives its error as a value.

    Works from a thread whose event loop is already running (a notebook) as well: then in a thread of its own.
    """

    async def timed(awaitable: Awaitable[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            value = await awaitable
        except (Exception, SystemExit) as error:
            value = _Failed(error)
        return value, time.perf_counter() - start

    async def together() -> list[tuple[Any, float]]:
        return list(await asyncio.gather(*map(timed, awaitables)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(together())), name="trew-rewards")
    thread.start()
    thread.join()
    return outcome[0]


async def _each(values: Sequence[Any]) -> list[Any]:
    """verl's form, async: one coroutine per completion, together."""

    async def plain(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    return list(await asyncio.gather(*map(plain, values)))


def _raised(function: UserFunction, samples: Sequence[Sample], error: BaseException, step: int) -> RewardError:
    """The error of a call as a RewardError that names the sample, which is looked for by calling with one at a time."""
    place = f"reward {function.name!r} ({where(error, function.file)}) raised {describe(error)}"
    start = time.monotonic()
    for sample in samples:
        if time.monotonic() - start > SEARCH_SECONDS:
            return RewardError(f"{place}; which of its {len(samples)} completions it was could not be found quickly")
        try:
            raw = function.invoke([sample], step=step)
            if function.verl:
                raw = _each(raw)
            if inspect.isawaitable(raw):
                [(raw, _)] = run_together([raw])
        except (Exception, SystemExit):
            return RewardError(f"{place}; for {sample}")
        if isinstance(raw, _Failed):
            return RewardError(f"{place}; for {sample}")
    uids = ", ".join(dict.fromkeys(repr(s.prompt.uid) for s in samples))
    return RewardError(f"{place}; only for all {len(samples)} completions together, for none alone (prompts {uids})")
