"""A comparison as tables of text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...eval.comparison import Versus
from ...eval.statistics import Interval
from ..report.text import number
from .groups import shown
from .result import ComparedRuns

HEADINGS = ("group", "runs", "mean [95 %]", "sd", "IQM [95 %]")
AGAINST = ("minus the baseline", "difference [95 %]", "p", "P(better) [95 %]", "would be found", "verdict")


def describe(result: ComparedRuns) -> str:
    """The whole comparison."""
    return "\n".join(_lines(result))


def _lines(result: ComparedRuns) -> Iterator[str]:
    yield heading(result)
    if result.differing:
        yield "\nSettings that differ:"
        names = [g.name for g in result.groups]
        yield from _table([["setting", *names], *settings_rows(result)])
    yield ""
    yield from _table([list(HEADINGS), *group_rows(result)])
    if result.comparison.versus:
        yield f"\nAgainst {result.comparison.baseline}, paired by seed ({seeds_of(result)}):"
        yield from _table([list(AGAINST), *versus_rows(result)])
        yield ""
        yield from reading(result)
    for note in result.notes:
        yield f"Note: {note}."
    for member in result.left_out:
        yield f"Not counted, because it has not finished: {member.name}."


def heading(result: ComparedRuns) -> str:
    counts = ", ".join(str(len(g.members)) for g in result.groups)
    groups = "1 group" if len(result.groups) == 1 else f"{len(result.groups)} groups"
    return f"{result.metric.title}; {groups} with {counts} runs; {result.metric.better} is better"


def settings_rows(result: ComparedRuns) -> list[list[str]]:
    return [
        [key, *(shown(values[g.name]) if values[g.name] is not None else "default" for g in result.groups)]
        for key, values in result.differing.items()
    ]


def group_rows(result: ComparedRuns) -> list[list[str]]:
    return [
        [s.name, str(s.runs), _interval(s.mean, result), _value(s.sd, result), _interval(s.iqm, result)]
        for s in result.comparison.groups
    ]


def versus_rows(result: ComparedRuns) -> list[list[str]]:
    return [
        [
            v.name, _interval(v.difference, result, sign="+", equal=v.verdict == "equal"), _p(v.p_value),
            _interval(v.improvement, result),
            "none" if v.detectable is None else _value(v.detectable, result), v.verdict,
        ]
        for v in result.comparison.versus
    ]  # fmt: skip


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"  # 0.000 would say that there is no doubt


def seeds_of(result: ComparedRuns) -> str:
    """The seeds that all differences use, by task where there are several."""
    tasks = list(dict.fromkeys(task for task, _ in result.comparison.pairs))
    of = {task: ", ".join(str(s) for t, s in result.comparison.pairs if t == task) for task in tasks}
    if len(of) == 1:
        count = len(result.comparison.pairs)
        return f"{count} seeds: {next(iter(of.values()))}"
    return "; ".join(f"{task}: {seeds}" for task, seeds in of.items())


def reading(result: ComparedRuns) -> Iterator[str]:
    """How to read the comparisons, and what these seeds could and could not have shown."""
    versus, pairs = result.comparison.versus, len(result.comparison.pairs)
    if len(versus) > 1:
        yield f"The {len(versus)} intervals hold together in 95 of 100 studies; p is corrected for their number (Holm)."
    if all(v.detectable is None for v in versus):
        yield (
            f"{pairs} pairs of runs cannot show any difference: the smallest p-value that they can give is above 0.05. "
            f"It takes {result.fewest_seeds} or more."
        )
    else:
        yield (
            '"would be found" is the true difference that these seeds find in 80 of 100 studies; a smaller one may '
            "well be there."
        )
    yield from _needed(versus, result)


def _needed(versus: Sequence[Versus], result: ComparedRuns) -> Iterator[str]:
    """How many seeds it takes, by the largest spread of the pairs that are not told apart."""
    unclear = [v for v in versus if v.verdict == "not told apart" and math.isfinite(v.sd)]
    if not unclear:
        return
    widest = max(unclear, key=lambda v: v.sd)
    if needed := result.needed(widest):
        told = ", ".join(f"{count} for {size:g}" for size, count in needed.items())
        yield f"Pairs needed to find a difference, at the spread of {widest.name}: {told}."


def _interval(interval: Interval, result: ComparedRuns, *, sign: str = "", equal: bool = False) -> str:
    mean = _value(interval.mean, result, sign=sign)
    # Values that agree have shown no spread, which does not mean that there is none; but for runs that are ``equal`` to
    # the last bit, whose difference is known.
    point = math.isclose(interval.low, interval.high, rel_tol=1e-12, abs_tol=1e-15)
    if not math.isfinite(interval.low) or (point and not equal):
        return f"{mean} [no interval]"
    return f"{mean} [{_value(interval.low, result, sign=sign)}, {_value(interval.high, result, sign=sign)}]"


def score(value: float, result: ComparedRuns) -> str:
    """The score of one run."""
    return _value(value, result)


def _value(value: float, result: ComparedRuns, *, sign: str = "") -> str:
    if not math.isfinite(value):
        return "–"
    # Three places would make 0 of a column of small numbers, as a KL. What is smaller still is rounding.
    if not result.metric.is_share and 1e-15 < abs(value) < 0.01:
        return f"{value:{sign}.3g}"
    if result.metric.is_share or abs(value) <= 1:
        return f"{value:{sign}.3f}"
    return ("+" if sign and value > 0 else "") + number(value, 4)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
