"""Loads a user's function or value from the file that a recipe names: an explicit path, never a module search."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, nearest
from .preserved import importable, preserved_state


def is_file_spec(name: str) -> bool:
    """Whether a name means something in a file rather than a built-in.

    >>> is_file_spec("rewards.py:length"), is_file_spec("rewards.py"), is_file_spec("gsm8k")
    (True, True, False)
    """
    return ":" in name or name.endswith(".py") or "/" in name


def load_function(spec: str, modules: dict[Path, ModuleType] | None = None) -> tuple[Callable[..., Any], Path, str]:
    """The function of ``path/to/file.py:function``, the file's path and the function's name.

    Raises ConfigError with the one thing that is wrong. See :func:`load_named`.
    """
    function, path, name = load_named(spec, modules)
    if inspect.isclass(function):
        raise ConfigError(f"{path}: {name} is a class; make an object of it in the file and name that object")
    return function, path, name


def load_named(
    spec: str, modules: dict[Path, ModuleType] | None = None, *, value: tuple[type, ...] = ()
) -> tuple[Any, Path, str]:
    """The function or class of ``path/to/file.py:name``, or its value of these types; the file's path; the name.

    The file is run once per ``modules``; what it imports is looked for in its own folder after everything installed.
    Raises ConfigError with the one thing that is wrong.
    """
    modules = {} if modules is None else modules
    path, name = file_and_name(spec)
    if path not in modules:
        modules[path] = _run_file(path)
    return _named(modules[path], path, name, value), path, name


def short_name(name: str) -> str:
    """A name as people read it: of a file, its last part.

    >>> short_name("/home/ada/own.py:tent"), short_name("grpo")
    ('own.py:tent', 'grpo')
    """
    return os.path.basename(name) if is_file_spec(name) else name


def file_and_name(spec: str) -> tuple[Path, str]:
    """The file and the function's name in ``path/to/file.py:function``; the name is empty if it is left out.

    Raises ConfigError if there is no such file.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        # a path may contain colons: only one behind .py separates a name
        file, name = (spec, "") if spec.endswith(".py") else (file or spec, name)
    if "\0" in file:  # resolve would raise a ValueError that names nothing
        raise ConfigError(f"{file!r} is no path: it has a NUL")
    path = Path(os.path.expanduser(file)).resolve()
    if path.suffix != ".py":
        raise ConfigError(f"{spec!r} is not of the form path/to/file.py:function")
    if not path.is_file():
        raise ConfigError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    return path, name


def _named(module: ModuleType, path: Path, name: str, value: tuple[type, ...]) -> Any:
    """The function or value of that name in a module. Raises ConfigError, with the names that it could be."""
    # a function that the file imported is not one that it offers
    defined = [
        n for n, v in vars(module).items()
        if isinstance(v, value) or (callable(v) and getattr(v, "__module__", "") == module.__name__)
    ]  # fmt: skip
    choices = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    if not name:
        raise ConfigError(f"{path}: which function? write {path.name}:FUNCTION; {choices}")
    if not hasattr(module, name):
        raise ConfigError(f"{path}: has no function {name!r}{nearest(name, defined)}; {choices}")
    found = getattr(module, name)
    if not callable(found) and not isinstance(found, value):
        raise ConfigError(f"{path}: {name} is not a function but {type(found).__name__}; {choices}")
    return found


def _run_file(path: Path) -> ModuleType:
    # By path: two files of one name are two modules.
    tag = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = f"trew_user_file_{tag}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling of the file's own types look it up there
    try:
        with preserved_state(), importable(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{where(error, path)}: cannot be imported: {describe(error)}") from error
    return module


def sources_of(path: Path) -> dict[str, str]:
    """SHA-256 of a file and of the modules that were imported from its folder, by path below that; not of
    installed packages, or of what is imported only when a function is called."""
    folder, found = path.parent.resolve(), {path.resolve()}
    files = [
        file for name, module in [*sys.modules.items()]
        if name.partition(".")[0] != "trew" and (file := getattr(module, "__file__", None))
    ]  # fmt: skip
    # Thousands of modules share some hundreds of folders: only a file in this one, or a link, is resolved by itself.
    places = {place: os.path.realpath(place) for place in {os.path.dirname(file) for file in files}}
    within = (str(folder), os.path.join(folder, ""))
    for file in files:
        place = places[os.path.dirname(file)]
        if place == within[0] or place.startswith(within[1]) or os.path.islink(file):
            found.add(Path(file).resolve())
    own = [file for file in found if file.is_relative_to(folder) and "site-packages" not in file.parts]
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in own if file.is_file()
    }


def where(error: BaseException, path: Path) -> str:
    """``path:line`` of the innermost line of ``path`` that ``error`` came through, or ``path`` alone."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == path and error.lineno:
        return f"{path}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"{path}:{lines[-1]}" if lines else str(path)


def describe(error: BaseException) -> str:
    """The error's type and message on one line.

    >>> describe(KeyError("x")), describe(SystemExit())
    ("KeyError: 'x'", 'SystemExit')
    """
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
