"""The groups of a step, each with all completions of one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import table
from .answers import NotHere
from .parameters import Parameters
from .rows import KINDS, Place, number, rows
from .store import Store
from .viewed import ViewedRun

SORTS = ("group", "disagreement", "mean", "-mean")
MOST = 100


def groups(run: ViewedRun, store: Store, p: Parameters) -> dict[str, Any]:
    """The groups of a step, sorted, one page of them."""
    step, eval, sort = p.whole("step", least=0), bool(p.flag("eval")), p.one_of("sort", SORTS, "group")
    offset, limit = p.whole("offset", 0, least=0), p.whole("limit", 20, least=1, most=MOST)
    # The index grows and is replaced while a run trains; every request updates it.
    with run.lock:
        part = store.index(run, eval).parts.get(step)
        if part is None:
            what = "evaluation after step" if eval else "rollouts of step"
            raise NotHere(f"step: got {step}, but {run.name} has no readable {what} {step}")
        numbers, means, spreads = spread(part.columns["group"], part.columns["score"])
        keys = {"group": numbers, "disagreement": -spreads, "mean": means, "-mean": -means}
        # By the chosen key; numbers break ties. lexsort sorts by its last key first, and NaN last.
        order = np.lexsort((numbers, keys[sort]))
        try:
            shown = [
                _group(run, store, Place(eval, step, 0), np.flatnonzero(part.columns["group"] == numbers[i]))
                | {"mean": number(means[i]), "std": number(spreads[i])}
                for i in order[offset : offset + limit]
            ]
        except table.Unreadable as error:
            raise NotHere(f"{run.name}: the groups of step {step} cannot be shown: {error}") from None
        return {"total": len(numbers), "groups": shown}


def _group(run: ViewedRun, store: Store, at: Place, members: np.ndarray) -> dict[str, Any]:
    """Raises Unreadable where the index could be read and the texts cannot."""
    store.tables.get(run, at.eval, at.step)
    found = rows(run, store.tables, [Place(at.eval, at.step, int(i)) for i in members])
    if not found:
        raise table.Unreadable(f"{KINDS[at.eval]}/{at.step:06d}.parquet: has changed or is damaged")
    return {**{name: found[0][name] for name in ("group", "uid", "prompt", "prompt_hash", "gold")}, "rows": found}


def spread(keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different ``keys``, and mean and standard deviation of the finite scores of each; NaN where it has none.

    >>> [found.tolist() for found in spread(np.array([3, 1, 3]), np.array([0.0, 0.5, 1.0]))]
    [[1, 3], [0.5, 0.5], [0.0, 0.5]]
    """
    numbers, codes = np.unique(keys, return_inverse=True)
    known = np.isfinite(scores)
    # (groups,): finite scores of each.
    counts = np.bincount(codes, known, minlength=len(numbers))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.bincount(codes, np.where(known, scores, 0.0), minlength=len(numbers)) / counts
        # Around the mean: the difference of large squares would be rounding.
        away = np.where(known, scores - means[codes], 0.0)
        spreads = np.sqrt(np.bincount(codes, away * away, minlength=len(numbers)) / counts)
    return numbers, means, spreads
