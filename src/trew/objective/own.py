"""Objectives that users write: a function with settings, or a value, in the file that a recipe names.

The code runs in the training process, on every rank: each of them loads the file itself, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..utils.preserved import preserved_state
from ..utils.user_files import describe, file_and_name, load_named, where
from .objective import Objective

KINDS: Mapping[str, type] = {"float": float, "int": int, "str": str, "bool": bool}
"""The types that settings may have, by the text of their annotation; `` | None`` may follow."""

_MODULES: dict[Path, ModuleType] = {}
_SOURCES: dict[Path, dict[Path, str]] = {}
"""SHA-256 by file of each file that was loaded, and of what it imports from its folder, as they were then."""
_IMPORTED: dict[Path, set[str]] = {}
"""The modules that came into the process with a file."""


@dataclass(frozen=True)
class Own:
    """What a file has under a name: ``make`` returns the objective, and its parameters are the settings."""

    path: Path
    name: str
    make: Callable[..., Objective]
    doc: str


def kind_of(annotation: Any) -> type | None:
    """The type of a setting, that of a number where it may also be left out; None for any other annotation.

    >>> kind_of("float | None"), kind_of(int), kind_of("Tensor")
    (<class 'float'>, <class 'int'>, None)
    """
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return KINDS.get(text.removesuffix(" | None"))


def load(spec: str) -> Own:
    """What ``path/to/file.py:name`` is. Raises ConfigError with what is wrong.

    The file is run once in a process, and again only after it has changed, with what it imports from its folder.
    """
    try:
        path, _ = file_and_name(spec)
        _forget_changed(path)
        before = {*sys.modules}
        found, path, name = load_named(spec, _MODULES, value=(Objective,))
        if path not in _SOURCES:
            _IMPORTED[path] = {*sys.modules} - before
            files = [path, *_files_within(path.parent, _reached(_MODULES[path], _IMPORTED[path]))]
            _SOURCES[path] = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    except ConfigError as error:
        raise ConfigError([f"objective.preset: {problem}" for problem in error.problems]) from error
    if isinstance(found, Objective):
        return Own(path, name, lambda: found, _MODULES[path].__doc__ or "")
    if problem := _misfit(found):
        raise ConfigError(f"objective.preset: {path}: {name}{problem}")
    return Own(path, name, found, inspect.getdoc(found) or "")


def sources(spec: str) -> dict[str, str]:
    """SHA-256 of the file of a loaded objective and of the modules beside it that it imports, as they were when it was
    loaded, by path below its folder."""
    path, _ = file_and_name(spec)
    return {str(file.relative_to(path.parent)): digest for file, digest in _SOURCES.get(path, {}).items()}


def make(own: Own, settings: Mapping[str, Any]) -> Objective:
    """The objective with these settings. Raises ValueError, ``name: got ...``, for a value that a component refuses,
    and ConfigError for anything else that goes wrong in the user's code."""
    try:
        with preserved_state():
            made = own.make(**settings)
    except (Exception, SystemExit) as error:
        # A component's message begins with the setting, which the recipe has under the same name.
        if isinstance(error, ValueError) and str(error).partition(":")[0] in inspect.signature(own.make).parameters:
            raise
        raise ConfigError(
            f"objective.preset: {where(error, own.path)}: {own.name}() failed: {describe(error)}"
        ) from error
    if not isinstance(made, Objective):
        raise ConfigError(
            f"objective.preset: {own.path}: {own.name}() returned {type(made).__name__}, accepts a "
            "trew.objective.Objective, such as trew.preset('grpo').replace(name=..., weight=...)"
        )
    return made


def _misfit(function: Any) -> str:
    """Why a function cannot make an objective from settings, as the end of a sentence; empty if it can."""
    if inspect.isclass(function):
        return " is a class; name a function that returns an Objective, or an Objective"
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) or p.name == "preset":
            return f"() has the parameter {p}, which no key of [objective] can set; name each setting"
        if p.default is p.empty:
            return f"() has no default for {p.name}; every setting needs one, as in {p.name}: float = 0.2"
        if (kind := kind_of(p.annotation)) is None:
            got = "no type" if p.annotation is p.empty else f"the type {p.annotation}"
            return f"() gives {p.name} {got}, accepts {', '.join(KINDS)}, as in {p.name}: float = 0.2"
        numbers = (int, float) if kind is float else (kind,)
        if p.default is not None and type(p.default) not in numbers:
            return f"() gives {p.name} the default {p.default!r}, which is no {kind.__name__}; change one of them"
    return ""


# ---- which files it is made of


def _forget_changed(path: Path) -> None:
    """Has a file that has changed since it was loaded be loaded again, in a notebook for instance."""
    changed = [file for file, digest in _SOURCES.get(path, {}).items() if _digest(file) != digest]
    if not changed:
        return
    known = _SOURCES[path]
    for file in changed:  # Python takes bytecode for current by the source's size and second
        with contextlib.suppress(OSError):
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    for name in _IMPORTED.pop(path):
        if (module := sys.modules.get(name)) is not None and _file(module) in known:
            del sys.modules[name]
    del _MODULES[path], _SOURCES[path]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _reached(module: ModuleType, imported: set[str]) -> set[str]:
    """The names of modules that a file has imported: those that came with it, and those that were there already and
    that it, or one of them, has a part of."""
    found, waiting = set(imported), [module, *(sys.modules[name] for name in imported if name in sys.modules)]
    while waiting:
        for value in [*vars(waiting.pop()).values()]:
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            other = sys.modules.get(name) if isinstance(name, str) else None
            if other is not None and name not in found and _is_near(other, module):
                found.add(other.__name__)
                waiting.append(other)
    return found


def _is_near(other: ModuleType, module: ModuleType) -> bool:
    """Whether a module lies in the folder of another one, or below it."""
    file, own = _file(other), _file(module)
    return file is not None and own is not None and file.is_relative_to(own.parent)


def _files_within(folder: Path, names: set[str]) -> Iterator[Path]:
    """The files of these modules that lie in a folder or below it, but for installed packages."""
    for name in sorted(names):
        file = _file(sys.modules[name]) if name in sys.modules else None
        if file is not None and file.is_relative_to(folder) and "site-packages" not in file.parts and file.is_file():
            yield file


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
