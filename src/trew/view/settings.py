"""The settings of runs, side by side."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from ..config import Config
from ..utils.toml import flatten, json_value
from .viewed import ViewedRun


def config(run: ViewedRun) -> dict[str, Any]:
    """config.toml as it is, and its settings by name."""
    return {"text": run.text("config.toml"), "values": json_value(run.values)}


def compared(runs: list[ViewedRun]) -> dict[str, Any]:
    """Every setting of the runs, with its default; a run without it has none there. Where one trains a reward model
    there are no defaults: its settings of the same names have others."""
    names = dict.fromkeys(key for run in runs for key in run.values)
    usual = None if any(run.kind == "reward" for run in runs) else defaults()
    return {
        "keys": [
            {
                "key": key,
                "values": {run.id: json_value(run.values[key]) for run in runs if key in run.values},
                "differs": len({_known(run, key) for run in runs}) > 1,
            }
            | ({} if usual is None else {"default": usual.get(key)})
            for key in names
        ]
    }


def _known(run: ViewedRun, key: str) -> str:
    return repr(run.values[key]) if key in run.values else ""


@cache
def defaults() -> dict[str, Any]:
    """The defaults of `trew train`, by name.

    >>> defaults()["rollout.temperature"]
    1.0
    """
    return {
        name: value for name, value in flatten(_plain(dataclasses.asdict(Config(model="")))).items() if name != "model"
    }


def _plain(value: Any) -> Any:
    """Tuples as lists, as they are in TOML."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
