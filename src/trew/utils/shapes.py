"""Parses foreign values into typed ones. A shape is an annotation; a value fits it, or a message says why not.

    read(Manifest, json_object(text), "manifest.json")

Known are int, float, str, bool, None, Any (whatever JSON can hold), object (unchecked), Literal, unions, list, tuple,
dict with texts as keys, dataclasses (every field is needed unless it has a default, no other is accepted), and
Annotated with an :class:`AtLeast`. Numbers must be finite, and whole ones must fit 64 bits: nothing that is read can
overflow later. A numbers.Real may be infinite or NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
LARGEST = 2**63 - 1


class ShapeError(ValueError):
    """A value does not fit its shape; the message names its place, what was found and what is accepted."""


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """The smallest number that is accepted."""

    least: float


Count = Annotated[int, AtLeast(0)]
Share = Annotated[float, AtLeast(0)]


def json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """JSON whose outermost value is an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ShapeError(f"{where}: is not valid JSON: {why}") from None
    if not isinstance(value, dict):
        raise ShapeError(f"{where}: {_got(value)}, accepts an object")
    return value


def read(shape: type[T], value: Any, where: str) -> T:
    """``value`` as ``shape``; raises ShapeError, in which ``where`` is what the value is called.

    >>> read(tuple[int, float], [1, 2], "pair")
    (1, 2.0)
    >>> read(dict[str, Count], {"a": -1}, "told")
    Traceback (most recent call last):
    trew.utils.shapes.ShapeError: told.a: got -1, accepts 0 or more
    """
    return _read(shape, value, where)


def _read(shape: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(shape), typing.get_args(shape)
    if origin is Annotated:
        return _at_least(args, _read(args[0], value, where), where)
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in args else _read(_other(args), value, where)
    if origin is Literal:
        # True == 1 in Python: without the second test, true would pass for Literal[1].
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            raise ShapeError(f"{where}: {_got(value)}, accepts {', '.join(map(repr, args))}")
        return value
    if origin in (list, tuple, dict):
        return _CONTAINERS[origin](args, value, where)
    if dataclasses.is_dataclass(shape):
        return _record(shape, value, where)
    return _scalar(shape, value, where)


def _other(args: tuple[Any, ...]) -> Any:
    """The member of ``X | None`` that is not None."""
    [other] = [a for a in args if a is not type(None)]
    return other


def _at_least(args: tuple[Any, ...], value: Any, where: str) -> Any:
    for rule in args[1:]:
        if isinstance(rule, AtLeast) and value < rule.least:
            raise ShapeError(f"{where}: got {value!r}, accepts {rule.least:g} or more")
    return value


def _list(args: tuple[Any, ...], value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ShapeError(f"{where}: {_got(value)}, accepts a list")
    return [_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_list(args[:1], value, where))
    if not isinstance(value, (list, tuple)) or len(value) != len(args):
        raise ShapeError(f"{where}: {_got(value)}, accepts a list of {len(args)}")
    return tuple(_read(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _dict(args: tuple[Any, ...], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise ShapeError(f"{where}: {_got(value)}, accepts an object")
    return {k: _read(args[1], v, f"{where}.{k}") for k, v in value.items()}


_CONTAINERS: dict[Any, Any] = {list: _list, tuple: _tuple, dict: _dict}


def _record(shape: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ShapeError(f"{where}: {_got(value)}, accepts an object")
    fields, hints = dataclasses.fields(shape), typing.get_type_hints(shape, include_extras=True)
    # An unknown field is not skipped: it comes from another version, and may change what the known ones mean.
    if unknown := sorted(set(value) - {f.name for f in fields}):
        raise ShapeError(f"{where}: has {unknown[0]!r}, which is unknown here")
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if lacking := [name for name in needed if name not in value]:
        raise ShapeError(f"{where}: {lacking[0]!r} is missing")
    return shape(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})


_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", type(None): "null",
    Any: "what JSON can hold",
}  # fmt: skip


def _scalar(shape: Any, value: Any, where: str) -> Any:
    if shape is object:
        return value
    if shape is Any:
        return _plain(value, where)
    if shape is numbers.Real:  # the one type that may be NaN or infinite; float may not
        if isinstance(value, float) and not math.isfinite(value):
            return value
        return _scalar(float, value, where)
    # JSON has one kind of number: a whole one is a float too, but True is none.
    fits = isinstance(value, (int, float) if shape is float else shape)
    if not fits or (isinstance(value, bool) and shape is not bool) or not _bounded(value):
        raise ShapeError(f"{where}: {_got(value)}, accepts {_NAMES[shape]}")
    return float(value) if shape is float else value


def _bounded(value: Any) -> bool:
    """Whether a number is finite, and a whole one of 64 bits; what is no number is."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= LARGEST


def _plain(value: Any, where: str) -> Any:
    """What JSON can hold, every number in it bounded."""
    if isinstance(value, Mapping):
        return _dict((str, Any), value, where)
    if isinstance(value, (list, tuple)):
        return _list((Any,), value, where)
    if not isinstance(value, (int, float, str, type(None))) or not _bounded(value):
        raise ShapeError(f"{where}: {_got(value)}, accepts {_NAMES[Any]}")
    return value


def _got(value: Any) -> str:
    """Describes a value briefly, whatever its size.

    >>> _got([1, 2]), _got({}), _got(10**30), _got("x" * 99)[:9]
    ('got a list of 2', 'got an object', 'got a number of 31 digits', "got 'xxxx")
    """
    if isinstance(value, Mapping):
        return "got an object"
    if isinstance(value, (list, tuple)):
        return f"got a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return f"got a number of {_digits(value)} digits"
    text = json.dumps(value) if isinstance(value, (bool, type(None))) else repr(value)
    return f"got {text if len(text) <= 60 else text[:57] + '...'}"


def _digits(value: int) -> int:
    """The number of decimal digits, without writing them out: Python refuses that beyond 4,300."""
    # log10(2) digits for each bit: at most one too many, as for 2**63.
    return math.floor(abs(value).bit_length() * math.log10(2)) + 1
