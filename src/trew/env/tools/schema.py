"""Makes tools of functions: the JSON schema comes from type hints and the docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError
from ..protocol import Tool

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_EXAMPLE = 'write a docstring with a line for each argument under "Args:", and a type hint for each'


def tool_of(function: Callable[..., Any]) -> Tool:
    """Makes a tool of a function, whose docstring says what it does and, under ``Args:``, what each argument is.

    Raises ConfigError if no schema can be made of it.

    >>> def weather(city: str, days: int = 1) -> str:
    ...     '''The forecast for a city.
    ...
    ...     Args:
    ...         city: its name
    ...         days: how many days ahead
    ...     '''
    ...     return "rain"
    >>> tool_of(weather).parameters["required"], tool_of(weather).parameters["properties"]["days"]["type"]
    (['city'], 'integer')
    """
    # An object that is called has no __name__; its class says what it is, for the message below.
    name = getattr(function, "__name__", type(function).__name__)
    if wrong := _unfit(function, name):
        raise ConfigError(f"tool {name}: {wrong}")
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)["function"]
    except Exception as error:  # its own two exceptions, and what evaluating annotations raises
        said = " ".join(" ".join(map(str, error.args)).split())  # some have their parts as arguments
        why = said.removeprefix(f"Cannot generate JSON schema for {name} because ").rstrip("!")
        raise ConfigError(f"tool {name}: {why}; {_EXAMPLE}") from None
    return Tool(name, schema["description"] or "", schema["parameters"], function, schema.get("return"))


def _unfit(function: Callable[..., Any], name: str) -> str:
    """Says why a function cannot be a tool; empty if it can."""
    if not inspect.isroutine(function):
        return f"must be a function, got an object of {type(function).__name__}"
    if not _NAME.fullmatch(name):
        return f"the name must be of letters, digits, _ and -, got {name!r}"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "must be a plain function, got an async function or a generator"
    try:
        kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):  # functions written in C may have none
        return "it has no signature; wrap it in a function with type hints"
    for parameter, kind in kinds.items():
        if kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            return f"its argument {parameter!r} cannot be given by name; tools are called by name alone"
    return ""
