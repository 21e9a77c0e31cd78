"""The messages between a run and the process of its reward functions, as JSON.

Columns of data rows are mostly JSON already; what parquet adds (bytes, dates, decimals, arrays) travels tagged. Nothing
that is read is ever executed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ...errors import RewardError

TAG = "\0"  # no column of a data file has this name


def encode(value: Any) -> bytes:
    """``value`` as bytes that :func:`decode` reads back equal, lone surrogates, NaN and tuples included.

    Raises RewardError for what has no such form: an object of a class of one's own, an open file.

    >>> decode(encode({"a": (1, b"x"), 2: date(2026, 1, 1)})) == {"a": (1, b"x"), 2: date(2026, 1, 1)}
    True
    """
    return json.dumps(_plain(value)).encode("ascii")


def decode(data: bytes) -> Any:
    """What :func:`encode` wrote."""
    return json.loads(data, object_hook=_restored)


def _plain(value: Any) -> Any:
    # Exact types only: a subclass of int, such as an IntEnum, would come back as another type than it went.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str) and not isinstance(value, np.generic):  # numpy's str keeps its type, below
        return str(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return _plain_table(value)
    for encoding in _ENCODINGS:
        if isinstance(value, encoding.kinds):
            return {TAG: encoding.tag, "v": encoding.write(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufU":
        return {TAG: "array" if isinstance(value, np.ndarray) else "number", "v": value.tolist(), "d": value.dtype.str}
    raise RewardError(
        f"a value of type {type(value).__name__} cannot be handed to a reward function, which runs in a process of its "
        "own; give text, numbers, dates, bytes, arrays, and lists and tables of them"
    )


def _plain_table(table: Mapping[Any, Any]) -> dict[str, Any]:
    """A table as it is where JSON can hold its keys, else as pairs: JSON makes text of every key."""
    # TAG as a key could be taken for one of our own tables.
    if all(type(key) is str for key in table) and TAG not in table:
        return {key: _plain(v) for key, v in table.items()}
    return {TAG: "pairs", "v": [[_plain(k), _plain(v)] for k, v in table.items()]}


def _plain_items(values: Iterable[Any]) -> list[Any]:
    return [_plain(v) for v in values]


def _plain_moment(value: date | clock) -> list[Any]:
    # isoformat leaves out the fold, which distinguishes the hour before clocks are set back from the hour after
    return [value.isoformat(), getattr(value, "fold", 0)]


class _Encoding(NamedTuple):
    """Encodes values of some types: ``write`` makes plain values of them, which travel under ``tag``."""

    tag: str
    kinds: type | tuple[type, ...]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_ENCODINGS = (
    _Encoding("tuple", tuple, _plain_items, tuple),
    _Encoding("set", (set, frozenset), _plain_items, set),
    _Encoding("bytes", bytes, lambda v: base64.b64encode(v).decode("ascii"), base64.b64decode),
    # before date: a datetime is a date too
    _Encoding("datetime", datetime, _plain_moment, lambda v: datetime.fromisoformat(v[0]).replace(fold=v[1])),
    _Encoding("date", date, _plain_moment, lambda v: date.fromisoformat(v[0])),
    _Encoding("time", clock, _plain_moment, lambda v: clock.fromisoformat(v[0]).replace(fold=v[1])),
    _Encoding("timedelta", timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
    _Encoding("Decimal", Decimal, str, Decimal),
    _Encoding("Fraction", Fraction, str, Fraction),
)
"""The first encoding whose types fit is used; other values are refused."""
_READERS = {encoding.tag: encoding.read for encoding in _ENCODINGS}


def _restored(table: dict[str, Any]) -> Any:
    kind = table.get(TAG)
    if kind is None:
        return table
    v = table["v"]
    if kind == "pairs":
        return {_key(k): value for k, value in v}
    if kind in ("array", "number"):
        array = np.array(v, dtype=np.dtype(table["d"]))
        # [()] makes a numpy scalar of an array without dimensions.
        return array if kind == "array" else array[()]
    return _READERS[kind](v)


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
