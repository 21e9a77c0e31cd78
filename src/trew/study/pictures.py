"""The pictures of a study as SVG: forest plots of the differences, curves with bands beside performance profiles, and
the results at every value of the tuned setting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..eval.comparison import Comparison
from ..eval.seeds import mean_over_seeds, performance_profile
from ..runs.report import Series, line_chart
from ..runs.report.forest import ForestRow, forest, forests
from ..runs.report.shades import ShadedRow, shades
from ..runs.report.svg import side_by_side
from .analysis import Regime, regimes, tuning
from .choice import Tuned
from .design import Cell
from .rows import Row

_AT_ONCE = 4
"""Algorithms in one picture, beside the baseline: more bands could not be told apart."""
_THRESHOLDS = 101
_PANEL: dict[str, Any] = {"width": 480, "height": 280, "standalone": False}


def draw(found: Mapping[str, Any]) -> dict[str, str]:
    """All pictures by their file names."""
    made = {}
    found_of = regimes(found)
    if len(compared := [regime for regime in found_of if regime.final is not None]) > 1:
        made[glance_name(found)] = _glance(compared, found["design"]["baseline"])
    for regime in found_of:
        if regime.final is not None:
            made[forest_name(found, regime)] = _forest(regime.name, regime.final, found["design"]["baseline"])
        names = curve_names(found, regime)
        made |= {name: _curves(found, regime, part) for name, part in zip(names, _parts(found, regime), strict=True)}
    return made | {name: _tuning(found, cells) for name, cells in _tuned_cells(found).items()}


def glance_name(found: Mapping[str, Any]) -> str:
    return f"study-{found['study']}-glance.svg"


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


def _glance(compared: Sequence[Regime], baseline: str) -> str:
    panels = {f"{regime.name}, {len(final.pairs)} pairs": _differences(final)
              for regime in compared if (final := regime.final) is not None}  # fmt: skip
    title = f"Final accuracy minus that of {baseline}, by regime; a ring is not told apart from it"
    return forests(panels, title=title, x_label="difference with 95 % intervals, simultaneous in a regime")


def _forest(name: str, final: Comparison, baseline: str) -> str:
    title = f"{name}: final accuracy minus that of {baseline}, {len(final.pairs)} pairs of runs"
    return forest(_differences(final), title=title, x_label="difference with simultaneous 95 % intervals")


def _differences(final: Comparison) -> list[ForestRow]:
    return [
        ForestRow(v.name, *v.difference, text=v.verdict, hollow=not v.told_apart)
        for v in sorted(final.versus, key=lambda v: v.name)
    ]


def tuning_names(found: Mapping[str, Any]) -> list[str]:
    return list(_tuned_cells(found))


def _tuned_cells(found: Mapping[str, Any]) -> dict[str, dict[Cell, Tuned]]:
    """The cells of each picture of the tuning, by its file name: one for each regime."""
    made: dict[str, dict[Cell, Tuned]] = {}
    for cell, tuned in sorted(tuning(found).items()):
        made.setdefault(f"study-{found['study']}-{cell.regime}-tuning.svg", {})[cell] = tuned
    return made


def _tuning(found: Mapping[str, Any], cells: Mapping[Cell, Tuned]) -> str:
    design = found["design"]
    one_task = len(design["tasks"]) == 1
    rows = [
        ShadedRow(cell.algorithm if one_task else f"{cell.task}/{cell.algorithm}", tuned.areas,
                  tuned.best if tuned.seeds == design["tuning_seeds"] else None)
        for cell, tuned in cells.items()
    ]  # fmt: skip
    regime = next(iter(cells)).regime
    return shades(
        rows, [f"{value:g}" for value in design["values"]], x_label=design["tuned"],
        title=f"{regime}: mean height of the held-out curve over tuning seeds; the frame is the choice",
    )  # fmt: skip


def _curves(found: Mapping[str, Any], regime: Regime, algorithms: Sequence[str]) -> str:
    """Curves over steps, and beside them the distribution of where the runs ended."""
    shared = regime.shared()
    curves = [_series(name, shared[name]) for name in algorithms]
    profiles = _profiles(regime, algorithms)
    charts = [
        line_chart(
            _unnamed(curves),
            x_label="equal completions, in steps" if regime.whole else "step",
            y_label="share correct",
            y_range=_range(regime),
            **_PANEL,
        ),
        line_chart(profiles, x_label="final accuracy τ", y_label="share of runs above τ", y_range=(0.0, 1.0), **_PANEL),
    ]
    return side_by_side(
        charts, width=_PANEL["width"], height=_PANEL["height"], legend=curves,
        title=f"{regime.name}: held-out accuracy over steps, and where runs end; means and 95 % intervals over runs",
    )  # fmt: skip


def _range(regime: Regime) -> tuple[float, float]:
    """Where the curves of the regime's algorithms lie, to the next 0.05: the same for all of its pictures. From 0 to 1
    the algorithms of most studies would be one line."""
    every = [_series(name, rows) for name, rows in regime.shared().items()]
    ends = [float(v) for s in every for at in (s.y, s.low, s.high) for v in at or () if v is not None]
    known = [v for v in ends if math.isfinite(v)]
    low = min(0.95, max(0.0, math.floor(20 * min(known)) / 20))
    return low, max(low + 0.05, min(1.0, math.ceil(20 * max(known)) / 20))


def _unnamed(series: Sequence[Series]) -> list[Series]:
    # One legend for both panels.
    return [dataclasses.replace(each, name="") for each in series]


def _profiles(regime: Regime, algorithms: Sequence[str]) -> list[Series]:
    """Performance profiles over the range in which the regime's runs ended, the same for all of its pictures."""
    shared = regime.shared()
    finals = [row.final for rows in shared.values() for row in rows]
    at = [float(x) for x in np.linspace(min(finals), max(finals), _THRESHOLDS)]
    found = []
    for name in algorithms:
        shares = performance_profile([[row.final for row in rows] for rows in _by_task(shared[name])], at)
        found.append(Series("", at, [s.mean for s in shares], [s.low for s in shares], [s.high for s in shares]))
    return found


def _series(name: str, rows: Sequence[Row]) -> Series:
    """The mean over runs, and over tasks, at each step at which all of them were evaluated or have ended."""
    curves = {row: dict(zip(row.steps, row.accuracy, strict=True)) for row in rows}
    every = sorted({step for row in rows for step in row.steps})
    # Tasks may be evaluated at other steps than others, or have fewer.
    steps = [step for step in every if all(step in of or step > row.steps[-1] for row, of in curves.items())]
    tasks = _by_task(rows)
    intervals = [
        mean_over_seeds([[curves[row].get(step, row.accuracy[-1]) for row in of] for of in tasks]) for step in steps
    ]
    return Series(name, steps, [i.mean for i in intervals], [i.low for i in intervals], [i.high for i in intervals])


def _by_task(rows: Sequence[Row]) -> list[list[Row]]:
    """Tasks apart: how much they differ is no uncertainty of a mean."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return list(found.values())
