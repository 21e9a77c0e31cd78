"""What kind of row of metrics.jsonl a row is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a row is of an evaluation, by accuracy or by loss, rather than of a step.

    >>> is_evaluation({"step": 3, "eval_loss": 1.5}), is_evaluation({"step": 3, "loss": 1.5})
    (True, False)
    """
    return "eval_accuracy" in row or "eval_loss" in row
