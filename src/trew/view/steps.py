"""The rewards of each step: their spread, and a histogram with the same edges throughout the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from .index import Index, Part
from .rows import number
from .store import Store
from .viewed import ViewedRun

BINS = 20
LOW, HIGH = 0.1, 0.9
"""The quantiles of a step."""


def steps(run: ViewedRun, store: Store) -> dict[str, Any]:
    """Every step with completions, and every evaluation."""
    with run.lock:
        training, evals = store.index(run, False), store.index(run, True)
        return {
            "steps": store.kept(run, "steps", training, lambda: _steps(training)),
            "evals": store.kept(run, "evals", evals, lambda: _evals(evals)),
            "quantiles": [LOW, HIGH],
            # Of all completions: one whose episode failed was judged by none.
            "parts": [*dict.fromkeys([*training.whole.parts, *evals.whole.parts])],
            "unreadable": [*training.damaged.values(), *evals.damaged.values()],
        }


def _steps(index: Index) -> list[dict[str, Any]]:
    # Over the whole run, so that histograms of steps can be compared.
    edges = _edges(index.whole.columns["score"])
    return [_step(step, index.parts[step], edges) for step in sorted(index.parts)]


def _step(step: int, part: Part, edges: np.ndarray) -> dict[str, Any]:
    scores = part.columns["score"]
    known = scores[np.isfinite(scores)]
    low, high = np.quantile(known, (LOW, HIGH)) if len(known) else (None, None)
    return {
        "step": step,
        "rows": len(scores),
        "groups": len(np.unique(part.columns["group"])),
        "mean": number(known.mean()) if len(known) else None,
        "low_quantile": number(low),
        "high_quantile": number(high),
        "histogram": {"edges": edges.tolist(), "counts": np.histogram(known, edges)[0].tolist()},
    }


def _evals(index: Index) -> list[dict[str, Any]]:
    found = []
    for step in sorted(index.parts):
        part = index.parts[step]
        known = part.columns["score"][np.isfinite(part.columns["score"])]
        found.append({
            "step": step, "rows": len(part), "groups": len(np.unique(part.columns["group"])),
            "mean": number(known.mean()) if len(known) else None,
        })  # fmt: skip
    return found


def _edges(scores: np.ndarray) -> np.ndarray:
    """Equal bins over all finite scores of the run; a run with one score has one bin around it."""
    known = scores[np.isfinite(scores)]
    if not len(known):
        return np.array([0.0, 1.0])
    low, high = float(known.min()), float(known.max())
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        return np.array([low - 0.5, high + 0.5])
    with np.errstate(over="ignore"):
        edges = np.linspace(low, high, BINS + 1)
    # Extreme scores: bins overflow, or are narrower than floats can tell apart.
    return edges if np.isfinite(edges).all() and (np.diff(edges) > 0).all() else np.array([low, high])
