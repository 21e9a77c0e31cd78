"""The rows of a training in rounds (`trew iterate`): a round is shown as a step."""

from __future__ import annotations

import json
from typing import Any


def round_row(line: bytes) -> dict[str, Any] | None:
    """A line of rounds.jsonl as a metrics row; None for other lines.

    >>> round_row(b'{"round": 1, "policy": {"reward": [0.1, 0.5], "accuracy": 0.4}}')
    {'step': 1, 'policy/reward': 0.5, 'policy/accuracy': 0.4}
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or isinstance(row.get("round"), bool) or not isinstance(row.get("round"), int):
        return None
    found = {"step": row["round"]}
    for name, value in row.items():
        if name != "round":
            found |= _numbers(name, value)
    return found


def _numbers(name: str, value: Any, depth: int = 0) -> dict[str, Any]:
    """The numbers below ``name``; of a list of numbers the last one."""
    if isinstance(value, dict) and depth < 4:
        # Bounded: a file from anywhere may be nested deeply.
        return {k: v for key, inner in value.items() for k, v in _numbers(f"{name}/{key}", inner, depth + 1).items()}
    if isinstance(value, list) and value:
        return _numbers(name, value[-1], depth + 1) if not isinstance(value[-1], (dict, list)) else {}
    return {name: value} if isinstance(value, (int, float)) and not isinstance(value, bool) else {}
