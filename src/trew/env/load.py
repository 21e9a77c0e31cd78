"""Finds the environment that a recipe names, and makes one object per episode of it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, nearest
from ..utils.user_files import is_file_spec, load_named, sources_of
from .adapters import ADAPTERS, JUDGE_STOPPED, adapt
from .builtin.calculator import calculator
from .builtin.grid import grid
from .builtin.guess import guess
from .protocol import Environment, Episode, Reply, Reward, Say
from .tools import ToolLoop
from .tools import load as load_tools

TOOLS_SHARE = 0.8
"""Of a step's time, what calls of tools may take: a slow tool is an observation, a slow step ends the episode."""

ENVIRONMENTS: Mapping[str, Callable[..., Episode]] = {"guess": guess, "grid": grid, "calculator": calculator}
"""Built-in environments, by name."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a recipe says of an environment: a built-in name or ``path/to/file.py:name``, empty for tools alone; its
    arguments, and the names of tools."""

    name: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """``make`` returns the environment of an episode. ``sources`` has the SHA-256 of users' files, by path.
    ``judges_stopped``: it is a :class:`.protocol.JudgesStopped`."""

    make: Callable[[], Environment]
    sources: Mapping[str, str] = field(default_factory=dict)
    judges_stopped: bool = False


class Generated:
    """An episode that is played by a generator."""

    def __init__(self, function: Callable[..., Episode], args: Mapping[str, Any]) -> None:
        self._function, self._args = function, args
        self._episode: Episode | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        self._episode = self._function(row, seed, **self._args)
        try:
            return Say.of(next(self._episode))
        except StopIteration:
            raise ValueError("it returned before it said anything; yield the opening first") from None

    def step(self, reply: Reply) -> Say:
        assert self._episode is not None
        try:
            return Say.of(self._episode.send(reply))
        except StopIteration as end:
            return _last(end.value)

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()


def load(spec: Spec, *, timeout_s: float = 20.0) -> Loaded:
    """Loads an environment and its tools; runs the files that they are in. Calls of tools have most of ``timeout_s``,
    the time of a step. Raises ConfigError with what is wrong."""
    tools, sources = load_tools(spec.tools)
    if not spec.name and tools:
        return Loaded(lambda: ToolLoop(tools, seconds=TOOLS_SHARE * timeout_s), sources)
    found = _named(spec)
    return Loaded(
        lambda: ToolLoop(tools, found.make(), seconds=TOOLS_SHARE * timeout_s), {**sources, **found.sources},
        found.judges_stopped,
    )  # fmt: skip


def _named(spec: Spec) -> Loaded:
    """Loads the environment that a recipe names."""
    # ---- an adapter, a built-in environment, or a user's file
    kind, colon, rest = spec.name.partition(":")
    if colon and kind in ADAPTERS:
        try:
            return Loaded(*adapt(kind, rest, spec.args), kind in JUDGE_STOPPED)
        except ConfigError as error:
            raise ConfigError([_in_name(problem, spec.name) for problem in error.problems]) from error
    if not is_file_spec(spec.name):
        if spec.name not in ENVIRONMENTS:
            raise ConfigError(
                f"environment.name: got {spec.name!r}, accepts {', '.join(ENVIRONMENTS)}, path/to/file.py:name, or "
                f"PACKAGE:NAME with {', '.join(ADAPTERS)}{nearest(spec.name, ENVIRONMENTS)}"
            )
        made = _factory(ENVIRONMENTS[spec.name], spec, spec.name)
        _check_values(ENVIRONMENTS[spec.name], spec)
        return Loaded(made)
    modules: dict[Path, ModuleType] = {}
    try:
        found, path, name = load_named(spec.name, modules)
    except ConfigError as error:
        raise ConfigError([f"environment.name: {problem}" for problem in error.problems]) from error
    # Only a class can judge stopped episodes: a generator has no second method to ask.
    judges_stopped = inspect.isclass(found) and callable(getattr(found, "stopped", None))
    return Loaded(_factory(found, spec, f"{path}:{name}"), sources_of(path), judges_stopped)


def _in_name(problem: str, name: str) -> str:
    """A problem that an adapter found, with the recipe's key in front."""
    return problem if problem.startswith("environment.") else f"environment.name: {name}: {problem}"


def _check_values(function: Callable[..., Episode], spec: Spec) -> None:
    """Raises ConfigError for values that a built-in environment cannot take: a misspelt word would pass unnoticed."""
    problems = []
    for name, hint in inspect.get_annotations(function, eval_str=True).items():
        if name not in spec.args:
            continue
        value, words = spec.args[name], typing.get_args(hint)
        if words:
            right, accepts = value in words, ", ".join(map(repr, words))
        elif hint is int:
            # type() and not isinstance(): True is an int.
            right, accepts = type(value) is int and value >= 1, "a whole number of at least 1"
        else:
            right = type(value) in (int, float) and 0 <= value < float("inf")
            accepts = "a number of at least 0"
        if not right:
            problems.append(f"environment.args.{name}: got {value!r}, accepts {accepts}")
    if problems:
        raise ConfigError(problems)


def _factory(found: Any, spec: Spec, who: str) -> Callable[[], Environment]:
    """What makes one episode's environment of a generator function or a class."""
    is_class: bool = inspect.isclass(found)
    # Decorators may hide what kind of function it is; the call still goes through them.
    function = inspect.unwrap(found)
    if inspect.isasyncgenfunction(function):
        raise ConfigError(f"environment.name: {who} is an async generator; write it as a plain generator")
    if is_class:
        if missing := [name for name in ("reset", "step") if not callable(getattr(found, name, None))]:
            raise ConfigError(f"environment.name: class {who} has no {' and no '.join(missing)}; it needs both")
    elif not inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"environment.name: {who} is neither a generator function (reply = yield observation) nor a class with "
            "reset and step"
        )
    try:
        signature = inspect.signature(found)
        # A class is made with the arguments alone; a generator function gets row and seed before them.
        signature.bind(**spec.args) if is_class else signature.bind({}, 0, **spec.args)
    except TypeError as error:
        raise ConfigError(f"environment.args: {who}: {error}; it takes {inspect.signature(found)}") from None
    make: Any = found
    return (lambda: make(**spec.args)) if is_class else (lambda: Generated(make, spec.args))


def _last(value: Reward) -> Say:
    """What a generator returned: the last reply's reward, or numbers by name."""
    if not isinstance(value, Mapping):
        return Say(reward=value, done=True)
    numbers = {name: number for name, number in value.items() if name != "reward" and number is not None}
    return Say(reward=value.get("reward"), done=True, metrics=numbers)
