"""The pictures of a study: forest plots of the differences, and curves with bands, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..eval.statistics import mean_interval
from ..runs.report import Series, line_chart
from ..runs.report.forest import ForestRow, forest
from .analysis import Regime, regimes
from .rows import Row

_AT_ONCE = 4
"""Algorithms in one picture, beside the baseline: more bands could not be told apart."""


def draw(found: Mapping[str, Any]) -> dict[str, str]:
    """All pictures by their file names."""
    made = {}
    for regime in regimes(found):
        if regime.final is not None:
            made[forest_name(found, regime)] = _forest(regime, found["design"]["baseline"])
        names = curve_names(found, regime)
        made |= {name: _curves(found, regime, part) for name, part in zip(names, _parts(found, regime), strict=True)}
    return made


def forest_name(found: Mapping[str, Any], regime: Regime) -> str:
    return f"study-{found['study']}-{regime.name}-forest.svg"


def curve_names(found: Mapping[str, Any], regime: Regime) -> list[str]:
    return [f"study-{found['study']}-{regime.name}-curves-{i + 1}.svg" for i in range(len(_parts(found, regime)))]


def _parts(found: Mapping[str, Any], regime: Regime) -> list[list[str]]:
    """The algorithms of each picture: the baseline and some others."""
    baseline = found["design"]["baseline"]
    others = [name for name in regime.rows if name != baseline]
    own = [baseline] if baseline in regime.rows else []
    return [own + others[i : i + _AT_ONCE] for i in range(0, len(others), _AT_ONCE)] or [own]


def _forest(regime: Regime, baseline: str) -> str:
    assert regime.final is not None
    rows = [
        ForestRow(v.name, v.difference.mean, v.difference.low, v.difference.high, v.verdict)
        for v in sorted(regime.final.versus, key=lambda v: v.name)
    ]
    pairs = len(regime.final.pairs)
    title = f"{regime.name}: final accuracy minus that of {baseline}, {pairs} pairs of runs"
    return forest(rows, title=title, x_label="difference with simultaneous 95 % intervals")


def _curves(found: Mapping[str, Any], regime: Regime, algorithms: Sequence[str]) -> str:
    series = [_series(name, regime.rows[name]) for name in algorithms]
    return line_chart(
        series, title=f"{regime.name}: held-out accuracy, mean and 95 % interval over runs", x_label="step",
        y_label="share correct", y_range=(0.0, 1.0), width=720,
    )  # fmt: skip


def _series(name: str, rows: Sequence[Row]) -> Series:
    """The mean over runs at each step at which all of them were evaluated or have ended."""
    steps = max((row.steps for row in rows), key=len)
    values = [[row.accuracy[min(i, len(row.accuracy) - 1)] for row in rows] for i in range(len(steps))]
    intervals = [mean_interval(at) for at in values]
    return Series(name, steps, [i.mean for i in intervals], [i.low for i in intervals], [i.high for i in intervals])
