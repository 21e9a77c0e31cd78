"""Validates what a user's function returned before any of it is used."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ...errors import RewardError

WANTED = "a list with one number or None per completion"


def as_list(returned: Any, *, count: int, who: str) -> list[Any]:
    """Converts ``returned`` to a list of ``count`` entries; takes lists, tuples, and 1-d arrays and tensors.

    >>> as_list((1, None), count=2, who="f")
    [1, None]
    """
    if hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # numpy, torch, pandas
        if returned.ndim != 1:
            raise RewardError(f"{who} returned {type(returned).__name__} with {returned.ndim} dimensions, not {WANTED}")
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        hint = "; did you forget `return`?" if returned is None else ""
        raise RewardError(f"{who} returned {type(returned).__name__} ({short(returned)}), not {WANTED}{hint}")
    # Never padded or cut: with one value missing, it is unknown which completion lacks it.
    if len(returned) != count:
        discard(returned)
        raise RewardError(f"{who} returned {len(returned)} values for {count} completions, not {WANTED}")
    return list(returned)


def as_number(value: Any, *, who: str, sample: str) -> float | None:
    """Converts one reward to a float: None, or a finite number of any numeric type (a bool is 1 or 0).

    Raises RewardError, naming the function and the sample, for text, nested values, coroutines, NaN and infinity.

    >>> as_number(True, who="f", sample="s"), as_number(None, who="f", sample="s")
    (1.0, None)
    """
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy scalars, 0-d arrays and tensors
        value = value.item()
    # A forgotten await gets its own message: the type's name alone would not explain it.
    if inspect.isawaitable(value):
        discard(value)
        raise RewardError(f"{who} returned a coroutine for {sample}; await it, or make the function async")
    if not isinstance(value, (numbers.Real, Decimal)):
        raise RewardError(f"{who} returned {type(value).__name__} ({short(value)}) for {sample}, not a number or None")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an int beyond float's range, a signalling NaN of Decimal
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"{who} returned {short(value)} for {sample}; rewards must be finite, None means that it does not apply"
        )
    return number


def verl_score(value: Any, *, who: str, sample: str) -> float | None:
    """Reads one result of a verl ``compute_score``: a number, or a mapping with the number under ``score``.

    >>> verl_score({"score": 0.5, "acc": True}, who="f", sample="s")
    0.5
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            raise RewardError(f"{who} returned a dict without 'score' for {sample}; it has {keys}")
        value = value["score"]
    return as_number(value, who=who, sample=sample)


def short(value: Any) -> str:
    """Formats ``value`` for a message, on one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's class may have a broken __repr__
        text = "unprintable"
    return text if len(text) <= 80 else text[:79] + "…"


def discard(value: Any) -> None:
    """Closes coroutines that will not be awaited; otherwise Python warns about them after the actual message."""
    if inspect.iscoroutine(value):
        value.close()
    elif isinstance(value, (list, tuple)):
        for entry in value:
            discard(entry)
