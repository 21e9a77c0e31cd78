"""Finds a row's gold among its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

GOLD_COLUMNS = ("gold", "ground_truth", "answer")  # the first one present; else verl's reward_model.ground_truth


def first(*values: Any) -> Any:
    """Returns the first of ``values`` that is not None.

    >>> first(None, 0, 1)
    0
    """
    return next((value for value in values if value is not None), None)


def first_column(columns: Mapping[str, Any], names: Iterable[str] = GOLD_COLUMNS) -> Any:
    """Returns a row's gold: the first of ``names`` that is present and not None, else verl's reward_model.ground_truth.

    >>> first_column({"answer": None, "reward_model": {"ground_truth": "72"}})
    '72'
    """
    found = first(*(columns.get(name) for name in names))
    nested = columns.get("reward_model")
    return nested.get("ground_truth") if found is None and isinstance(nested, Mapping) else found
