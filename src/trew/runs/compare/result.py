"""The result of a comparison, and its form in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...eval import seeds
from ...eval.comparison import Comparison, GroupSummary, Versus
from ...eval.statistics import LEVEL, Interval
from ...utils.toml import json_value
from .groups import Differences, RunGroup
from .members import Member
from .metrics import Metric

ROUND_DIFFERENCES = (0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """A comparison with everything that its reader needs to judge it."""

    metric: Metric
    groups: tuple[RunGroup, ...]
    scores: Mapping[str, float]  # by run
    differing: Differences  # settings in which the groups differ
    comparison: Comparison
    notes: tuple[str, ...]  # what a reader must know before believing the numbers
    left_out: tuple[Member, ...]  # unfinished runs that are not counted

    def needed(self, versus: Versus, *, differences: Sequence[float] = ROUND_DIFFERENCES) -> dict[float, int]:
        """How many seeds find a true difference of each size in 80 % of studies, by the spread of these pairs."""
        if not self.metric.is_share or not math.isfinite(versus.sd):
            return {}
        count = len(self.comparison.versus)
        return {d: seeds.pairs_needed(versus.sd, d, comparisons=count) for d in differences}

    @property
    def fewest_seeds(self) -> int:
        """The fewest seeds with which any of these comparisons could find a difference."""
        return seeds.least_pairs(max(1, len(self.comparison.groups) - 1))


def to_json(result: ComparedRuns) -> dict[str, Any]:
    """The whole result as plain values; what is not known is None."""
    c = result.comparison
    summaries = {s.name: s for s in c.groups}
    return {
        "metric": {"title": result.metric.title, "better": result.metric.better},
        "level": LEVEL,
        "power": seeds.POWER,
        "baseline": c.baseline,
        "settings_that_differ": {key: json_value(values) for key, values in result.differing.items()},
        "groups": [_group(group, summaries[group.name], result) for group in result.groups],
        "pairs": [{"task": task, "seed": seed} for task, seed in c.pairs],
        "comparisons": [_versus(versus, result) for versus in c.versus],
        "not_compared": list(c.unpaired),
        "unused_runs": [{"group": name, "task": task, "seed": seed} for name, (task, seed) in c.unused],
        "left_out": [m.name for m in result.left_out],
        "fewest_seeds": result.fewest_seeds,
        "notes": list(result.notes),
    }


def _group(group: RunGroup, summary: GroupSummary, result: ComparedRuns) -> dict[str, Any]:
    return {
        "name": group.name,
        "mean": _interval(summary.mean),
        "sd": _known(summary.sd),
        "iqm": _interval(summary.iqm),
        "runs": [
            {"folder": m.name, "seed": seed, "task": task, "finished": m.finished, "score": result.scores[m.name]}
            for m, (task, seed) in zip(group.members, group.pairs, strict=True)
        ],
    }


def _versus(versus: Versus, result: ComparedRuns) -> dict[str, Any]:
    return {
        "name": versus.name,
        "pairs": versus.pairs,
        "difference": _interval(versus.difference),
        "sd": _known(versus.sd),
        "p_value": versus.p_value,
        "pairs_won": versus.won,
        "probability_of_improvement": _interval(versus.improvement),
        "detectable_difference": versus.detectable,
        "seeds_needed": {f"{size:g}": count for size, count in result.needed(versus).items()},
        "verdict": versus.verdict,
    }


def _interval(interval: Interval) -> dict[str, float | None]:
    return {key: _known(value) for key, value in interval._asdict().items()}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
