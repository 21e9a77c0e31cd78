"""Loads the tools that a recipe names: built-in ones, and functions in the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ...errors import ConfigError, nearest
from ...utils.user_files import is_file_spec, load_function, sources_of
from ..protocol import Tool
from .builtin import BUILTIN, sandbox
from .schema import tool_of


def load(names: Sequence[str]) -> tuple[tuple[Tool, ...], dict[str, str]]:
    """Loads tools by name, ``calculator``, ``python`` or ``path/to/file.py:function``, with the SHA-256 of their files.

    Raises ConfigError with every problem, and SandboxError if ``python`` is asked for on a machine without a sandbox.
    """
    found: dict[str, Tool] = {}
    problems: list[str] = []
    modules: dict[Path, ModuleType] = {}
    for name in names:
        try:
            tool = _tool(name, modules)
        except ConfigError as error:
            problems += [f"environment.tools: {problem}" for problem in error.problems]
            continue
        if tool.name in found:
            problems.append(f"environment.tools: two tools have the name {tool.name!r}; rename one of the functions")
        found[tool.name] = tool
    if problems:
        raise ConfigError(problems)
    # Tested now: a machine without a sandbox is refused before anything is played.
    if any(tool.function is BUILTIN["python"] for tool in found.values()):
        sandbox()
    sources: dict[str, str] = {}
    for file in modules:
        sources |= sources_of(file)
    return tuple(found.values()), sources


def _tool(name: str, modules: dict[Path, ModuleType]) -> Tool:
    if is_file_spec(name):
        function, _, _ = load_function(name, modules)
        return tool_of(function)
    if name not in BUILTIN:
        raise ConfigError(
            f"there is no built-in tool {name!r}{nearest(name, BUILTIN)}; built in: {', '.join(BUILTIN)}; a function "
            "of your own is path/to/file.py:function"
        )
    return tool_of(BUILTIN[name])
