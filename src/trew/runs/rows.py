"""Encodes rows of metrics.jsonl as valid JSON whose columns stay numeric."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def encode_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Encodes a row as valid JSON whose columns stay numeric: non-finite values become null, kept in ``not_finite``.

    >>> encode_row({"step": 3, "loss": float("nan"), "kl": 0.5})
    {'step': 3, 'loss': None, 'kl': 0.5, 'not_finite': {'loss': 'nan'}}
    """
    plain = {str(k): scalar(v) for k, v in row.items()}
    # JSON has no NaN. A string in place of the number would make the column mixed for every reader of the file.
    special = {k: str(v) for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**plain, **dict.fromkeys(special), "not_finite": special} if special else plain


def decode_row(line: bytes | str) -> dict[str, Any] | None:
    """Decodes a line that ``encode_row`` wrote; None for a line that is not a row with a step.

    >>> decode_row('{"step": 3, "loss": null, "not_finite": {"loss": "-inf"}}')
    {'step': 3, 'loss': -inf}
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # deeply nested brackets exhaust the parser's stack
        return None
    if not isinstance(row, dict) or isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int):
        return None
    special = row.pop("not_finite", {})
    # Only the three words that encode_row writes: the file may have been edited.
    if isinstance(special, dict):
        row.update({k: float(v) for k, v in special.items() if v in ("nan", "inf", "-inf")})
    return row


def scalar(value: Any) -> bool | int | float | str | None:
    """Converts a number of any library to a plain Python one; raises TypeError for other types."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()  # numpy scalar, or a tensor of one number
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a metrics row or summary cannot hold a {type(value).__name__}: {value!r}")
