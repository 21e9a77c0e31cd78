"""What the runs of a study say: differences to the baseline with simultaneous intervals, failures, robustness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..eval.comparison import Comparison, GroupScores, compare
from .choice import Tuned, tuned_of
from .design import Cell
from .results import rows_of
from .rows import Row

REACHED = (0.5, 0.8)
"""Shares of the best algorithm's final accuracy; how many completions a run needs to get there is reported."""

_SCORES: tuple[Callable[[Row], float], ...] = (
    lambda row: row.final, lambda row: row.area, lambda row: float(not row.failed)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regime:
    """All algorithms in one regime, over its tasks."""

    name: str
    rows: Mapping[str, Sequence[Row]]  # by algorithm, sorted by name
    final: Comparison | None  # of the final accuracy; None if nothing can be compared
    area: Comparison | None  # of the mean height of the held-out curve
    held: Comparison | None  # of the share of runs that did not fail
    why_not: str  # the reason for None

    def failures(self, algorithm: str) -> Counter[str]:
        return Counter(row.failed for row in self.rows[algorithm] if row.failed)

    def reached(self, algorithm: str) -> list[float]:
        """Mean completions until a run is at each share of the best algorithm's final accuracy, by task.

        A run that never reaches it counts with all of its completions (a restricted mean).
        """
        return [float(np.mean([_reach(row, share * self._best(row.task)) for row in self.rows[algorithm]]))
                for share in REACHED]  # fmt: skip

    def _best(self, task: str) -> float:
        # An algorithm without a run of the task has no mean there.
        means = [np.mean([r.final for r in rows if r.task == task]) for rows in self.rows.values()
                 if any(r.task == task for r in rows)]  # fmt: skip
        return float(max(means))


def regimes(found: Mapping[str, Any]) -> list[Regime]:
    """The analysis of every regime with a run that is reported."""
    rows, baseline = rows_of(found, "runs"), found["design"]["baseline"]
    result = []
    for name in found["design"]["regimes"]:
        by: dict[str, list[Row]] = {}
        for row in rows:
            if row.regime == name:
                by.setdefault(row.algorithm, []).append(row)
        if by:
            result.append(_regime(name, dict(sorted(by.items())), baseline))
    return result


def tuning(found: Mapping[str, Any]) -> dict[Cell, Tuned]:
    """The results of every cell at each value of the tuned setting."""
    design = found["design"]
    cells = [Cell(t, r, a) for t in design["tasks"] for r in design["regimes"] for a in design["algorithms"]]
    return tuned_of(cells, tuple(design["values"]), rows_of(found, "tuning"))


def _regime(name: str, rows: Mapping[str, Sequence[Row]], baseline: str) -> Regime:
    if baseline not in rows:
        return Regime(name, rows, None, None, None, f"no run of the baseline {baseline} has ended")
    try:
        final, area, held = (_compared(rows, baseline, score) for score in _SCORES)
    except DataError:
        return Regime(name, rows, None, None, None, "the algorithms have fewer than two seeds in common")
    if not final.versus:
        return Regime(name, rows, None, None, None, "no algorithm has two seeds in common with the baseline")
    return Regime(name, rows, final, area, held, "")


def _compared(rows: Mapping[str, Sequence[Row]], baseline: str, score: Callable[[Row], float]) -> Comparison:
    groups = [GroupScores(name, {(row.task, row.seed): score(row) for row in of}) for name, of in rows.items()]
    return compare(groups, baseline=baseline)


def _reach(row: Row, accuracy: float) -> int:
    at = next((i for i, value in enumerate(row.accuracy) if value >= accuracy), len(row.accuracy) - 1)
    return row.completions[at]
