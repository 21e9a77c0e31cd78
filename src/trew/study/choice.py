"""Chooses the tuned setting of every cell by its tuning seeds, and measures how much the choice matters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .design import Cell, Study
from .rows import Row

GOOD = 0.9
"""Share of an algorithm's best area from which a value counts as good."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The results of a cell at each value of the tuned setting, on the tuning seeds."""

    values: tuple[float, ...]
    areas: tuple[float, ...]  # mean over tuning seeds
    failed: tuple[int, ...]  # runs
    seeds: int = 0  # tuning seeds, each with a run at every value
    runner_up: int | None = None  # the index of the next best value; None if only one was tried
    lead: float = math.nan  # of the best over it: the mean paired difference
    lead_se: float = math.nan  # its standard error; nan with one seed

    @property
    def best(self) -> int:
        """The index of the chosen value: the one with the largest mean area; of equals, the smallest value."""
        # argmax takes the first of equals, and values are in ascending order (design.load).
        return int(np.argmax(self.areas))

    @property
    def at_an_end(self) -> bool:
        """Whether the chosen value is the smallest or the largest that was tried: a better one may lie beyond it."""
        return self.best in (0, len(self.values) - 1)

    @property
    def width(self) -> float:
        """Decades around the best value in which the area stays good.

        >>> Tuned((0.001, 0.01, 0.1), (0.5, 0.5, 0.1), (0, 0, 3)).width
        1.0
        """
        good = [area >= GOOD * self.areas[self.best] for area in self.areas]
        # Without gaps: a good value beyond a bad one does not widen the range.
        low = high = self.best
        while low > 0 and good[low - 1]:
            low -= 1
        while high < len(good) - 1 and good[high + 1]:
            high += 1
        return math.log10(self.values[high] / self.values[low])

    @property
    def at_three_times(self) -> float | None:
        """The share of the best area that is left at three times the chosen value (the next of half decades); None if
        that was not tried."""
        best = self.values[self.best]
        # A half decade is a factor of 3.16, which grids round: 0.001, 0.003, 0.01.
        for value, area in zip(self.values, self.areas, strict=True):
            if 2.5 <= value / best <= 4:
                return area / self.areas[self.best] if self.areas[self.best] else None
        return None


def tuned_of(cells: Iterable[Cell], values: tuple[float, ...], rows: Iterable[Row]) -> dict[Cell, Tuned]:
    """The tuning of the cells, by the seeds with a run at every value: the best of some values is no choice, and means
    over different seeds cannot be compared. Cells without such a seed are left out."""
    by_cell: dict[Cell, dict[int, dict[float | None, Row]]] = {}
    for row in rows:
        by_cell.setdefault(row.run.cell, {}).setdefault(row.seed, {})[row.value] = row
    found = {}
    for cell in cells:
        if whole := [of for of in by_cell.get(cell, {}).values() if of.keys() >= set(values)]:
            found[cell] = _of(values, whole)
    return found


def choose(study: Study, rows: Iterable[Row]) -> dict[Cell, float | None]:
    """The value of every cell that is tuned completely: the one with the largest mean area under the held-out curve."""
    tuning = [row for row in rows if row.seed in study.tuning]
    counts = Counter(row.run.cell for row in tuning)
    # Every seed at every value: a run that ends later could still change the choice, and with it which runs are
    # reported.
    whole = [cell for cell in study.cells if counts[cell] == len(study.values) * len(study.tuning)]
    return {cell: found.values[found.best] for cell, found in tuned_of(whole, study.values, tuning).items()}


def _of(values: tuple[float, ...], seeds: Sequence[Mapping[float | None, Row]]) -> Tuned:
    areas = np.array([[of[value].area for value in values] for of in seeds])  # (seeds, values)
    # A stable order: of equals, the smallest value is the best, as in Tuned.best.
    order = np.argsort(-areas.mean(0), kind="stable")
    of_lead: dict[str, Any] = {}
    if len(values) > 1:
        leads = areas[:, order[0]] - areas[:, order[1]]
        error = leads.std(ddof=1) / math.sqrt(len(leads)) if len(leads) > 1 else math.nan
        of_lead = {"runner_up": int(order[1]), "lead": float(leads.mean()), "lead_se": float(error)}
    return Tuned(
        values,
        tuple(map(float, areas.mean(0))),
        tuple(sum(bool(of[value].failed) for of in seeds) for value in values),
        len(seeds),
        **of_lead,
    )
