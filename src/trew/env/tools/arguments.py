"""Checks the arguments of a call against the tool's JSON schema, and reads arguments that a format wrote as text.

The part of JSON Schema that :func:`transformers.utils.get_json_schema` writes is checked. A schema with other keywords
is refused when the tool is loaded, so that none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import nearest

DEEPEST = 100
"""Levels of an argument. A policy may write as many as it likes, and what checks and passes them on is recursive."""
_KNOWN = frozenset(
    {"type", "properties", "required", "items", "prefixItems", "enum", "anyOf", "nullable", "additionalProperties"}
    | {"title", "description", "default", "examples"}  # say nothing that could be checked
)
_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "string": ("text", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "array": ("a list", (list, tuple)),
    "object": ("an object", (dict,)),
    "null": ("null", (type(None),)),
}


def unknown_keywords(schema: Any) -> list[str]:
    """The keywords and types in a schema that are not checked here.

    >>> unknown_keywords({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}})
    ['minimum']
    """
    if not isinstance(schema, Mapping):
        return []
    found = [key for key in schema if key not in _KNOWN]
    found += [kind for kind in _types(schema) if kind not in _TYPES]
    inner = [*schema.get("properties", {}).values(), *schema.get("prefixItems", ()), *schema.get("anyOf", ())]
    for one in (*inner, schema.get("items"), schema.get("additionalProperties")):
        found += unknown_keywords(one)
    return found


def problems(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Says what is wrong with a call's arguments; empty if they fit.

    >>> schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    >>> problems({"town": "Rome"}, schema)
    ["there is no argument 'town' (arguments: city)", "the argument 'city' is missing"]
    >>> problems({"city": 5}, schema)
    ["'city' must be text, got 5"]
    """
    known = parameters.get("properties", {})
    extra = parameters.get("additionalProperties", False)
    listed = ", ".join(known) or "none"
    found = []
    for name, value in arguments.items():
        if name in known:
            found += _wrong(value, known[name], repr(name))
        elif isinstance(extra, Mapping):
            found += _wrong(value, extra, repr(name))
        elif not extra:
            found.append(f"there is no argument {name[:40]!r}{nearest(name[:40], known)} (arguments: {listed})")
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    return found + [f"the argument {name!r} is missing" for name in missing]


def _wrong(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if value is None and schema.get("nullable"):
        return
    options = schema.get("anyOf")
    # An option fits if it finds nothing wrong; any() stops at its first complaint.
    if options and all(any(True for _ in _wrong(value, option, where)) for option in options):
        yield f"{where} must be {' or '.join(_words(option) for option in options)}, got {_shown(value)}"
        return
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{where} must be one of {', '.join(map(_shown, schema['enum']))}, got {_shown(value)}"
        return
    kinds = _types(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where} must be {_words(schema)}, got {_shown(value)}"
        return
    yield from _wrong_inside(value, schema, where)


def _wrong_inside(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    """Checks the members of a list or an object."""
    if isinstance(value, (list, tuple)):
        fixed = schema.get("prefixItems")
        if fixed is not None and len(fixed) != len(value):
            yield f"{where} must have {len(fixed)} members, got {len(value)}"
        each: Sequence[Any] = fixed if fixed is not None else [schema.get("items", {})] * len(value)
        # Not strict: a wrong number of members was reported above.
        for i, (one, rule) in enumerate(zip(value, each, strict=False)):
            yield from _wrong(one, rule, f"{where}[{i}]")
    elif isinstance(value, dict):
        named, extra = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, one in value.items():
            # False means that no member beside the named ones is allowed; True, that anything is.
            rule = named.get(key, extra)
            if rule is False:
                yield f"{where} has no member {key[:40]!r}"
            elif isinstance(rule, Mapping):
                yield from _wrong(one, rule, f"{where}[{key[:40]!r}]")
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{where} lacks {key!r}"


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # an int to Python, and no number to JSON
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind][1])


def _same(value: Any, other: Any) -> bool:
    # True equals 1 in Python, but is no number in JSON.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _words(schema: Mapping[str, Any]) -> str:
    """What a schema accepts, in words."""
    if "enum" in schema:
        return "one of " + ", ".join(map(_shown, schema["enum"]))
    return " or ".join(_TYPES[kind][0] for kind in _types(schema)) or "anything"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


def converted(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments as the function takes them: 3.0 where the schema wants an integer is 3, in lists and
    objects too."""
    known, extra = parameters.get("properties", {}), parameters.get("additionalProperties", {})
    return {name: _converted(value, known.get(name, extra)) for name, value in arguments.items()}


def _converted(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):  # additionalProperties may be true
        return value
    # The option that the value fits; the first of them, as several may.
    for option in schema.get("anyOf", ()):
        if not any(True for _ in _wrong(value, option, "")):
            return _converted(value, option)
    kinds = _types(schema)
    if isinstance(value, float):
        return int(value) if "integer" in kinds and "number" not in kinds else value
    if isinstance(value, (list, tuple)):
        each = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        return [_converted(one, rule) for one, rule in zip(value, each, strict=False)]
    if isinstance(value, dict):
        named, extra = schema.get("properties", {}), schema.get("additionalProperties", {})
        return {key: _converted(one, named.get(key, extra)) for key, one in value.items()}
    return value


def from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Reads an argument that a format writes as bare text: text if the schema takes text, else JSON, or Python's True,
    False and None. Text that is no such value stays text, which the check of arguments refuses.

    >>> from_text("5", {"type": "integer"}), from_text("5", {"type": "string"}), from_text("True", {"type": "boolean"})
    (5, '5', True)
    """
    plain = text.strip()
    if schema.get("nullable") and plain in ("null", "None"):
        return None
    # Alternatives of anyOf count together: text that one of them takes stays text.
    kinds = {kind for one in schema.get("anyOf", (schema,)) for kind in _types(one)}
    written = [one for one in schema.get("enum", ()) if isinstance(one, str)]
    if "string" in kinds or text in written:
        return text
    try:
        return read_json({"True": "true", "False": "false", "None": "null"}.get(plain, plain))
    except ValueError:
        return text


# ---- strict JSON


def _number(text: str) -> float:
    # Python reads 1e999 as infinity, which JSON cannot write back.
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _whole(text: str) -> int:
    if len(text) > 400:  # longer than any float, and slow to convert
        raise ValueError("a number has more than 400 digits")
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise ValueError(f"{twice[:40]!r} is there twice")
    return found


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_whole, parse_constant=_no_number, object_pairs_hook=_once)


def read_json_at(text: str, at: int) -> tuple[Any, int]:
    """Reads one JSON value that begins at ``at``, and says where it ends. Raises ValueError for anything that is not
    exactly JSON: NaN, Infinity, a key given twice, nesting too deep to read."""
    # raw_decode stops where the value ends, which lets a format go on from there.
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:]
        raise ValueError(f"not JSON: {what} at character {error.pos - at + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_too_deep(value):
        raise ValueError("nested too deeply")
    return value, end


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than ``DEEPEST`` levels deep.

    >>> is_too_deep([[1], {"a": []}])
    False
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            one
            for inner in level
            if isinstance(inner, list | dict)
            for one in (inner.values() if isinstance(inner, dict) else inner)
        ]
        if not level:
            return False
    return True


def read_json(text: str) -> Any:
    """Reads a text that is one JSON value; raises ValueError otherwise."""
    value, end = read_json_at(text, 0)
    if text[end:].strip():
        raise ValueError(f"not JSON: more text at character {end + 1}")
    return value
