"""What is said between a run and the process that its reward functions live in, as JSON.

Columns of data rows are mostly JSON already; what parquet adds (bytes, dates, decimals, arrays) travels tagged. Nothing
that is read is ever executed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str) and not isinstance(value, np.generic):
        return str(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: _plain(v) for key, v in value.items()}
        return {TAG: "pairs", "v": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, (tuple, set, frozenset)):
        return {TAG: "tuple" if isinstance(value, tuple) else "set", "v": [_plain(v) for v in value]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (datetime, date, clock)):  # a datetime is a date too
        kind = "datetime" if isinstance(value, datetime) else "date" if isinstance(value, date) else "time"
        return {TAG: kind, "v": [value.isoformat(), getattr(value, "fold", 0)]}
    if isinstance(value, timedelta):
        return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, (Decimal, Fraction)):
        return {TAG: type(value).__name__, "v": str(value)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufU":
        return {TAG: "array" if isinstance(value, np.ndarray) else "number", "v": value.tolist(), "d": value.dtype.str}
    raise RewardError(
        f"a value of type {type(value).__name__} cannot be handed to a reward function, which runs in a process of its "
        "own; give text, numbers, dates, bytes, arrays, and lists and tables of them"
    )


def _restored(table: dict[str, Any]) -> Any:
    kind = table.get(TAG)
    if kind is None:
        return table
    v = table["v"]
    if kind == "pairs":
        return {_key(k): value for k, value in v}
    if kind in ("array", "number"):
        array = np.array(v, dtype=np.dtype(table["d"]))
        return array if kind == "array" else array[()]
    made = {
        "tuple": tuple, "set": set, "bytes": base64.b64decode,
        "datetime": lambda x: datetime.fromisoformat(x[0]).replace(fold=x[1]),
        "date": lambda x: date.fromisoformat(x[0]),
        "time": lambda x: clock.fromisoformat(x[0]).replace(fold=x[1]), "timedelta": lambda x: timedelta(*x),
        "Decimal": Decimal, "Fraction": Fraction,
    }  # fmt: skip
    return made[kind](v)


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
