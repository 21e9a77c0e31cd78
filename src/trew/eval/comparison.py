"""Compares groups of training runs with a baseline: pairs by seed, intervals, corrected p-values, power."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import DataError
from . import seeds
from .statistics import LEVEL, Interval, sign_flip

Pair = tuple[str, int]
"""What two runs must share to be paired: the task (data set) and the seed."""

Verdict = Literal["better", "worse", "equal", "not told apart"]


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The scores of the runs of one group: those that differ in their seed, or in their task, alone."""

    name: str
    scores: Mapping[Pair, float]


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group by itself, over all of its runs. With one seed in a task the intervals' ends are nan."""

    name: str
    runs: int
    mean: Interval
    sd: float  # between seeds, within tasks; nan with one seed
    iqm: Interval


@dataclass(frozen=True, slots=True)
class Versus:
    """A group minus the baseline, over the pairs that all comparisons share."""

    name: str
    pairs: int
    difference: Interval  # simultaneous over all comparisons
    sd: float  # of the paired differences, within tasks
    p_value: float  # of the sign-flip test, Holm-corrected for the number of comparisons
    won: int  # pairs in which this group is better
    improvement: Interval  # the chance that a run of this group is better than one of the baseline, of any seeds
    detectable: float | None  # the true difference that these pairs would find in 80 % of studies; None = none
    verdict: Verdict

    @property
    def told_apart(self) -> bool:
        return self.verdict in ("better", "worse")


@dataclass(frozen=True, slots=True)
class Comparison:
    """All groups, and each of them against the baseline."""

    baseline: str
    groups: tuple[GroupSummary, ...]
    versus: tuple[Versus, ...]
    pairs: tuple[Pair, ...]  # those that every comparison uses
    unpaired: tuple[str, ...]  # groups that share fewer than two seeds with the baseline: not compared
    unused: tuple[tuple[str, Pair], ...]  # runs that no comparison uses, because some group lacks their pair


def compare(
    groups: Sequence[GroupScores],
    *,
    baseline: str,
    better: Literal["higher", "lower"] = "higher",
    level: float = LEVEL,
    power: float = seeds.POWER,
) -> Comparison:
    """Compares every group with the one called ``baseline``.

    All comparisons use the same pairs, so that their intervals can hold simultaneously. A group is *better* or *worse*
    only if its simultaneous interval excludes 0 and its corrected p-value is at most 1 - ``level``: the interval relies
    on roughly normal differences, the p-value on few seeds can never be small. ``equal`` means the same to the last bit
    in every pair.

    Raises DataError if the groups that could be compared have fewer than two pairs in common.
    """
    by_name = {group.name: group for group in groups}
    base = by_name[baseline]
    others = [group for group in groups if group is not base]
    # Fewer than two seeds in common give no spread, and so no interval.
    paired = [group for group in others if _enough(base.scores.keys() & group.scores.keys())]
    pairs = _common([base, *paired])
    if paired and not pairs:
        raise DataError(_nothing_common([base, *paired]))
    return Comparison(
        baseline=baseline,
        groups=tuple(summary(group, level=level) for group in groups),
        versus=tuple(_versus(base, paired, pairs, 1.0 if better == "higher" else -1.0, level, power)),
        pairs=tuple(pairs),
        unpaired=tuple(group.name for group in others if group not in paired),
        unused=_unused([base, *paired], pairs) if paired else (),
    )


def summary(group: GroupScores, *, level: float = LEVEL) -> GroupSummary:
    """Mean, spread and interquartile mean of a group's runs."""
    tasks = _by_task(group, sorted(group.scores))
    return GroupSummary(
        group.name, len(group.scores), seeds.mean_over_seeds(tasks, level=level), pooled_sd(tasks),
        seeds.iqm_over_seeds(tasks, level=level),
    )  # fmt: skip


def _enough(pairs: set[Pair]) -> bool:
    """Whether some task has two seeds: a spread can be estimated."""
    # groupby joins neighbours only, so that pairs are sorted: by task, then by seed.
    return any(len(list(of)) >= 2 for _, of in itertools.groupby(sorted(pairs), key=lambda pair: pair[0]))


def _common(groups: Sequence[GroupScores]) -> list[Pair]:
    """The pairs that all groups have, in tasks with at least two of them."""
    shared = sorted(set.intersection(*(set(group.scores) for group in groups)))
    counts = {task: sum(pair[0] == task for pair in shared) for task, _ in shared}
    return [pair for pair in shared if counts[pair[0]] >= 2]


def _unused(compared: Sequence[GroupScores], pairs: Sequence[Pair]) -> tuple[tuple[str, Pair], ...]:
    """The runs whose pair some other group lacks."""
    return tuple((group.name, pair) for group in compared for pair in sorted(group.scores.keys() - set(pairs)))


def _nothing_common(groups: Sequence[GroupScores]) -> str:
    seeds_of = "; ".join(f"{g.name}: {', '.join(str(seed) for _, seed in sorted(g.scores))}" for g in groups)
    return (
        f"compare: the groups have fewer than two seeds that all of them share (seeds of {seeds_of}); train the "
        "missing ones, or compare fewer groups"
    )


def _by_task(group: GroupScores, pairs: Sequence[Pair]) -> list[np.ndarray]:
    # ``pairs`` are sorted by task: one array for each, with the seeds of all groups in one order, so that arrays
    # subtract.
    return [
        np.array([group.scores[pair] for pair in of])
        for _, of in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]  # fmt: skip


def pooled_sd(tasks: Sequence[np.ndarray]) -> float:
    """√(Σ_t (n_t - 1) s_t² / Σ_t (n_t - 1)); nan where no task has two seeds."""
    freedom = sum(x.size - 1 for x in tasks)
    return math.sqrt(sum(float(((x - x.mean()) ** 2).sum()) for x in tasks) / freedom) if freedom else math.nan


def _versus(
    base: GroupScores, paired: Sequence[GroupScores], pairs: Sequence[Pair], sign: float, level: float, power: float
) -> list[Versus]:
    if not paired:
        return []
    of_base = _by_task(base, pairs)
    # scores[group][task] and of_base[task] are arrays over seeds.
    scores = [_by_task(group, pairs) for group in paired]
    differences = [[x - y for x, y in zip(group, of_base, strict=True)] for group in scores]
    # One array (groups, seeds) for each task.
    stacked = [np.stack(task) for task in zip(*differences, strict=True)]
    intervals = seeds.simultaneous_intervals(stacked, level=level)
    p_values = seeds.holm([sign_flip(_weighted(d)) for d in differences])
    found = []
    for i, group in enumerate(paired):
        # P(better) where lower scores are better compares their negatives.
        better, than = ([sign * x for x in tasks] for tasks in (scores[i], of_base))
        sd = pooled_sd(differences[i])
        found.append(
            Versus(
                name=group.name,
                pairs=len(pairs),
                difference=intervals[i],
                sd=sd,
                p_value=p_values[i],
                won=sum(int((sign * d > 0).sum()) for d in differences[i]),
                improvement=seeds.probability_of_improvement(better, than, level=level),
                detectable=seeds.detectable_difference(
                    sd, len(pairs), tasks=len(of_base), comparisons=len(paired), power=power, level=level
                ),
                verdict=verdict_of(
                    intervals[i], p_values[i], changed=any(d.any() for d in differences[i]), sign=sign, level=level
                ),
            )
        )
    return found


def _weighted(differences: Sequence[np.ndarray]) -> np.ndarray:
    """All differences, weighted so that their mean is the mean over tasks."""
    n = sum(d.size for d in differences)
    # d_t n / (T n_t): the mean over all n values becomes the mean over T tasks of the mean over n_t seeds.
    return np.concatenate([d * (n / (len(differences) * d.size)) for d in differences])


def verdict_of(
    interval: Interval, p_value: float, *, changed: bool, sign: float = 1.0, level: float = LEVEL
) -> Verdict:
    """What an interval of a difference and its corrected p-value say together; ``changed`` is whether any pair differs.
    ``sign`` is -1 where lower scores are better."""
    if not changed:
        return "equal"
    # The slack is for a p-value that equals 1 - level but for rounding.
    if interval.low <= 0 <= interval.high or p_value > 1 - level + 1e-12:
        return "not told apart"
    return "better" if sign * interval.mean > 0 else "worse"
