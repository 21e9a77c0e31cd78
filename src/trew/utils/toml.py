"""Plain values written as TOML, in the form of a recipe; tomllib reads it back to equal values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def dump_table(table: Mapping[str, Any]) -> str:
    """Nested plain values as TOML; ``rewards`` is a list of tables, and ``data`` may be one."""
    table = dict(table)
    rewards = table.pop("rewards", ())
    # Plain values first: behind a heading they would belong to its section.
    lines = [f"{k} = {toml_value(v)}" for k, v in table.items() if not (isinstance(v, dict) or _are_tables(v))]
    for name, section in table.items():
        if isinstance(section, dict):
            lines += _section(f"[{name}]", section)
        for each in section if _are_tables(section) else ():
            lines += _section(f"[[{name}]]", each)
    for reward in rewards:
        lines += _section("[[rewards]]", reward)
    return "\n".join(lines) + "\n"


def _are_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, dict) for each in value)


def _section(heading: str, table: Mapping[str, Any]) -> list[str]:
    return ["", heading, *(f"{_key(k)} = {toml_value(v)}" for k, v in table.items())]


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    """
    >>> toml_value({"a": [1.5, True], "b c": "x"})
    '{a = [1.5, true], "b c" = "x"}'
    """
    # Before int: a bool is one.
    if isinstance(value, bool):
        return "true" if value else "false"
    # The plain number, since numpy's float64 is a float whose repr is no TOML: np.float64(0.5).
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        # Control characters and whatever else does not print, as TOML's eight-digit escapes.
        return '"' + "".join(ch if ch.isprintable() else f"\\U{ord(ch):08x}" for ch in escaped) + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"{type(value).__name__} has no TOML form: {value!r}")


def json_value(value: Any) -> Any:
    """A plain value as JSON can hold it: numbers that are not finite as the words that TOML has for them.

    >>> json_value({"a": [float("inf"), 0.5]})
    {'a': ['inf', 0.5]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {k: json_value(v) for k, v in value.items()}
    return list(map(json_value, value)) if isinstance(value, (list, tuple)) else value


def is_text(value: str) -> bool:
    """Whether TOML can hold it: a name of a file with bytes that are not UTF-8 has lone surrogates in their place.

    >>> is_text("é"), is_text("\\udcff")
    (True, False)
    """
    return not any("\ud800" <= ch <= "\udfff" for ch in value)


def flatten(table: Any, where: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    # Lists of plain values stay values; lists of tables are numbered.
    if isinstance(table, list) and any(isinstance(v, dict) for v in table):
        table = {str(i): v for i, v in enumerate(table)}
    if not isinstance(table, dict):
        return {where: table}
    return {k: v for name, value in table.items() for k, v in flatten(value, f"{where}.{name}".lstrip(".")).items()}
