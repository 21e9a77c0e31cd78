"""What the runs of a study say: differences to the baseline with simultaneous intervals, failures, robustness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import DataError
from ..eval.comparison import Comparison, GroupScores, Pair, Verdict, Versus, compare, pooled_sd, verdict_of
from ..eval.seeds import holm, pairs_needed
from ..eval.statistics import LEVEL, Interval, paired_difference, wilson
from .choice import Tuned, tuned_of
from .design import Cell
from .results import rows_of
from .rows import Row

REACHED = (0.5, 0.8)
"""Shares of the best algorithm's gain; how many completions a run needs to get there is reported. Of the gain and not
of the accuracy: a warm start may have half of that already."""
_DIFFERENCES = (0.05, 0.02, 0.01)
"""True differences of the final accuracy for which the number of pairs is told."""

FIGURES = ("final accuracy", "height of the curve")
_SCORES: tuple[Callable[[Row], float], ...] = (lambda row: row.final, lambda row: row.area)


@dataclass(frozen=True, slots=True)
class Held:
    """The share of an algorithm's runs that did not fail, and its difference to the baseline over the same pairs.

    Shares of few runs are far from normal, often 0 or 1: the share has the score (Wilson) interval, the difference
    Newcombe's for paired shares at the level 1 - α/k for k comparisons (Bonferroni), so that all of them hold together,
    and p is that of McNemar's exact test, corrected by Holm.
    """

    share: Interval
    difference: Interval | None  # None for the baseline, and for an algorithm that is not compared
    p_value: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Spread:
    """How much differences to the baseline vary between the tuning seeds, and how many pairs that asks for."""

    regime: str
    sd: float  # of the final accuracy's paired differences within algorithms, pooled over them
    needed: Mapping[float, int]  # true difference -> pairs that find it in 80 % of studies


@dataclass(frozen=True, slots=True)
class Regime:
    """All algorithms in one regime, over its tasks."""

    name: str
    rows: Mapping[str, Sequence[Row]]  # by algorithm, sorted by name; up to the same number of completions in a task
    whole: Mapping[str, Sequence[Row]]  # the same runs to their ends, of algorithms that sampled more than that
    final: Comparison | None  # of the final accuracy; None if nothing can be compared
    area: Comparison | None  # of the mean height of the held-out curve
    held: Mapping[str, Held]  # by algorithm; empty if nothing can be compared
    why_not: str  # the reason for None

    def failures(self, algorithm: str) -> Counter[str]:
        return Counter(row.failed for row in self.rows[algorithm] if row.failed)

    @property
    def figures(self) -> dict[str, Comparison]:
        """What is compared, by name; empty if nothing can be."""
        return (
            {} if self.final is None or self.area is None else dict(zip(FIGURES, (self.final, self.area), strict=True))
        )

    def start(self) -> float:
        """The mean accuracy before training."""
        return float(np.mean([row.accuracy[0] for rows in self.rows.values() for row in rows]))

    def shared(self) -> dict[str, Sequence[Row]]:
        """The runs of tasks and seeds that every algorithm has, by algorithm; all runs while there are none.

        While a study is not whole, algorithms have runs of different tasks, and their means would differ by these.
        """
        common = set.intersection(*({(row.task, row.seed) for row in of} for of in self.rows.values()))
        return {name: [row for row in of if (row.task, row.seed) in common] or of for name, of in self.rows.items()}

    def alike(self) -> list[list[str]]:
        """Groups of algorithms with the same seeds, and for each seed the same curve and the same tokens."""
        found: dict[Any, list[str]] = {}
        for name, rows in self.rows.items():
            runs = frozenset((row.task, row.seed, row.steps, row.accuracy, row.tokens) for row in rows)
            found.setdefault(runs, []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def reached(self, algorithm: str) -> list[float]:
        """Mean completions until a run has gained each share of the best algorithm's mean gain in its task.

        Gains are from the run's own start, as each seed may have problems of its own. A run that never gets there
        counts with all completions of its task (a restricted mean), also if it failed before it had sampled them: an
        early failure is no early success. Tasks in which no algorithm gained on average are left
        out: there is no share of that; nan if there is no other.
        """
        rows, budgets = self.shared()[algorithm], self.budgets()
        gains = {task: self._best_gain(task) for task in {row.task for row in rows}}
        rows = [row for row in rows if gains[row.task] > 0]
        return [float(np.mean([_reach(row, row.accuracy[0] + share * gains[row.task], never=budgets[row.task])
                               for row in rows])) if rows else math.nan for share in REACHED]  # fmt: skip

    def budgets(self) -> dict[str, int]:
        """The completions after which all algorithms are compared in each task: those of a run that did not end
        early."""
        found: dict[str, int] = {}
        for row in (row for of in self.rows.values() for row in of):
            found[row.task] = max(found.get(row.task, 0), row.completions[-1])
        return found

    def _best_gain(self, task: str) -> float:
        # An algorithm without a run of the task has no mean there.
        of = [found for rows in self.shared().values() if (found := [row for row in rows if row.task == task])]
        return float(max(np.mean([row.final - row.accuracy[0] for row in rows]) for rows in of))


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


def equal_budget(rows: Sequence[Row]) -> list[Row]:
    """The runs, each up to as many completions as every run of its task has sampled.

    Algorithms with dynamic sampling sample more in a step than others, so that at the same step they have had more.
    Runs that ended early say nothing about what the others may have.
    """
    # Of each cell by itself: tasks and algorithms may set their own number of steps.
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        last[row.task, row.algorithm] = max(last.get((row.task, row.algorithm), 0), row.steps[-1])
    least: dict[str, int] = {}
    for row in rows:
        if row.steps[-1] == last[row.task, row.algorithm] and not row.error:
            least[row.task] = min(least.get(row.task, row.completions[-1]), row.completions[-1])
    return [row.within(least.get(row.task, row.completions[-1])) for row in rows]


def jointly(compared: Sequence[Regime]) -> list[tuple[str, str, Versus]]:
    """The differences to the baseline of all regimes and both figures, compared at once: regime, figure, difference.
    Those that are equal to the last bit are left out: they are known, and ask for no correction of the others.

    Intervals are simultaneous over all of them, and p is Holm's for all, over the pairs that every regime has. Regimes
    share their seeds, which are resampled for all of them together.
    """
    zero: dict[Pair, float] = {}
    groups, names = [], {}
    for regime in compared:
        for (figure, comparison), score in zip(regime.figures.items(), _SCORES, strict=True):
            scores = {name: {(r.task, r.seed): score(r) for r in of} for name, of in regime.rows.items()}
            base = scores[comparison.baseline]
            zero |= dict.fromkeys(base, 0.0)
            for versus in comparison.versus:
                if versus.verdict == "equal":
                    continue
                of = scores[versus.name]
                name = f"{len(groups)}"
                names[name] = (regime.name, figure, versus.name)
                groups.append(GroupScores(name, {pair: of[pair] - base[pair] for pair in of.keys() & base.keys()}))
    try:
        found = compare([GroupScores("", zero), *groups], baseline="").versus
    except DataError:  # no two seeds in common
        return []
    return [(*names[v.name][:2], replace(v, name=names[v.name][2])) for v in found]


def tuning(found: Mapping[str, Any]) -> dict[Cell, Tuned]:
    """The results of every cell at each value of the tuned setting."""
    design = found["design"]
    cells = [Cell(t, r, a) for t in design["tasks"] for r in design["regimes"] for a in design["algorithms"]]
    return tuned_of(cells, tuple(design["values"]), rows_of(found, "tuning"))


def spreads(found: Mapping[str, Any]) -> list[Spread]:
    """The spread in each regime whose tuning is complete for the baseline and another algorithm.

    The runs are those of the tuning seeds at the chosen values: nothing that is reported is used, so that the number of
    seeds can be set by it.
    """
    design = found["design"]
    chosen = [row for row in rows_of(found, "tuning") if found["chosen"].get(row.run.cell.name) == row.value]
    result = []
    for name in design["regimes"]:
        by: dict[str, dict[Pair, float]] = {}
        if own := [row for row in chosen if row.regime == name]:
            for row in equal_budget(own):
                by.setdefault(row.algorithm, {})[row.task, row.seed] = row.final
        sd = pooled_sd(_differences(by, design["baseline"]))
        if not math.isnan(sd):  # no algorithm has two pairs with the baseline
            count = len(design["algorithms"]) - 1
            result.append(Spread(name, sd, {d: pairs_needed(sd, d, comparisons=count) for d in _DIFFERENCES}))
    return result


def _differences(finals: Mapping[str, Mapping[Pair, float]], baseline: str) -> list[np.ndarray]:
    """The paired differences to the baseline: one array for each algorithm and task."""
    base, found = finals.get(baseline, {}), []
    for name, of in finals.items():
        shared = of.keys() & base.keys() if name != baseline else ()
        for task in {task for task, _ in shared}:
            found.append(np.array([of[pair] - base[pair] for pair in shared if pair[0] == task]))
    return found


def _regime(name: str, whole: Mapping[str, Sequence[Row]], baseline: str) -> Regime:
    cut = iter(equal_budget([row for of in whole.values() for row in of]))
    rows = {name: [next(cut) for _ in of] for name, of in whole.items()}
    longer = {name: of for name, of in whole.items() if of != rows[name]}

    def without(why: str) -> Regime:
        return Regime(name, rows, longer, None, None, {}, why)

    if baseline not in rows:
        return without(f"no run of the baseline {baseline} has ended")
    try:
        final, area = (_compared(rows, baseline, score) for score in _SCORES)
    except DataError:
        return without("the algorithms have fewer than two seeds in common")
    if not final.versus:
        return without("no algorithm has two seeds in common with the baseline")
    return Regime(name, rows, longer, final, area, _held(rows, final), "")


def _held(rows: Mapping[str, Sequence[Row]], final: Comparison) -> dict[str, Held]:
    """The comparison of failures, over the pairs and the algorithms of that of the final accuracy."""
    kept = {name: {(row.task, row.seed): float(not row.failed) for row in of} for name, of in rows.items()}
    compared = [versus.name for versus in final.versus]
    of_base = [kept[final.baseline][pair] for pair in final.pairs]
    level = 1 - (1 - LEVEL) / len(compared)
    against = {
        name: paired_difference(of_base, [kept[name][pair] for pair in final.pairs], level=level) for name in compared
    }
    p_values = dict(zip(compared, holm([against[name].p_value for name in compared]), strict=True))
    found = {}
    for name, of in kept.items():
        share = wilson(sum(of.values()), len(of))
        if name not in against:
            found[name] = Held(share, None, 1.0, "equal")
            continue
        one, p_value = against[name], p_values[name]
        changed = one.better + one.worse > 0
        found[name] = Held(share, one.difference, p_value, verdict_of(one.difference, p_value, changed=changed))
    return found


def _compared(rows: Mapping[str, Sequence[Row]], baseline: str, score: Callable[[Row], float]) -> Comparison:
    groups = [GroupScores(name, {(row.task, row.seed): score(row) for row in of}) for name, of in rows.items()]
    return compare(groups, baseline=baseline)


def _reach(row: Row, accuracy: float, *, never: int) -> int:
    reached = zip(row.completions, row.accuracy, strict=True)
    return next((completions for completions, value in reached if value >= accuracy), never)
