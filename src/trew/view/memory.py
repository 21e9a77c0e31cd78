"""Memory of a run by process, phase and part: planned, and measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..diagnostics.health import finite
from .rows import parsed
from .viewed import ViewedRun, whole

FILE = "memory.json"
_MOST = 4096
"""Processes that are read of a file, which may come from anywhere."""


def memory(run: ViewedRun) -> dict[str, Any]:
    """Every process of the run with the bytes that were planned, by phase and part, and those that were measured, by
    phase. Runs of older versions recorded neither, only the peak of the whole run."""
    text = run.text(FILE)
    found = run.kept("memory", text, lambda: parsed(text))
    table = found if isinstance(found, dict) else {}
    plan = table.get("planned")
    plan = plan if isinstance(plan, dict) else {}
    processes: dict[str, dict[str, Any]] = {}
    for one in _list(plan.get("processes")):
        by_phase = {p: _sizes(parts) for p, parts in _mapping(one.get("memory")).items()}
        # Plan and measurement are joined by the name of the process.
        processes.setdefault(_name(one), _empty(one)).update(planned=by_phase)
    for one in _list(table.get("measured")):
        processes.setdefault(_name(one), _empty(one)).update(
            measured=_sizes(one.get("memory")), measured_peak_bytes=whole(finite(one.get("peak_bytes")))
        )
    why = plan.get("why")
    return {
        "processes": list(processes.values()),
        "why": why if isinstance(why, str) else None,
        "prompt_tokens": whole(finite(plan.get("prompt_tokens"))),
        "measured_peak_bytes": whole(finite(run.summary.get("peak_memory_bytes"))),
    }


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value[:_MOST] if isinstance(one, dict)] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sizes(value: Any) -> dict[str, int | float]:
    """
    >>> _sizes({"weights": 8, "wrong": "x", "less": -1})
    {'weights': 8}
    """
    known = {name: whole(finite(size)) for name, size in _mapping(value).items()}
    return {name: size for name, size in known.items() if size is not None and size >= 0}


def _name(process: Mapping[str, Any]) -> str:
    return str(process.get("who"))


def _empty(process: Mapping[str, Any]) -> dict[str, Any]:
    device = process.get("device")
    return {
        "who": _name(process), "device": device if isinstance(device, str) else None, "planned": {}, "measured": {},
        "measured_peak_bytes": None,
    }  # fmt: skip
