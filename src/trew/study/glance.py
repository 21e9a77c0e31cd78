"""The part of a study's report that shows all regimes next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..eval.comparison import Comparison, Versus
from . import pictures
from .analysis import FIGURES, Regime, jointly
from .tables import Table, interval_text, markdown


def glance(found: Mapping[str, Any], compared: Sequence[Regime], images: str) -> Iterator[str]:
    """The differences of all regimes next to each other."""
    baseline = found["design"]["baseline"]
    yield from [f"### All regimes of {found['study']}", ""]
    yield from [f"![Differences to {baseline} in all regimes]({images}{pictures.glance_name(found)})", ""]
    yield (
        f"Final accuracy minus that of `{baseline}`, whose own row is its mean; in bold where the table of the regime "
        "says better or worse, which takes the interval and p. Intervals hold together within a column, and do not "
        "compare regimes:"
    )
    yield from ["", *markdown(_glance_table(compared, [r.final for r in compared])), ""]
    yield from ["Mean height of the held-out curve, in the same way:", ""]
    yield from [*markdown(_glance_table(compared, [r.area for r in compared])), ""]
    yield from _joint(compared)


def _glance_table(compared: Sequence[Regime], comparisons: Sequence[Comparison | None]) -> Table:
    """One row for each algorithm, sorted by name, and one column for each regime."""
    columns = [(regime, comparison) for regime, comparison in zip(compared, comparisons, strict=True) if comparison]
    cells = {(regime.name, v.name): _glance_cell(v) for regime, comparison in columns for v in comparison.versus}
    for regime, comparison in columns:
        mean = next(group.mean.mean for group in comparison.groups if group.name == comparison.baseline)
        cells[regime.name, comparison.baseline] = f"{mean:.3f}, at the start {regime.start():.3f}"
    names = sorted({name for _, name in cells})
    head = ["algorithm", *(f"{regime.name}, {len(comparison.pairs)} pairs" for regime, comparison in columns)]
    return [
        head,
        *([name, *(cells.get((regime.name, name), "not compared") for regime, _ in columns)] for name in names),
    ]


def _joint(compared: Sequence[Regime]) -> Iterator[str]:
    """Which verdicts of the regimes' tables remain where all of them are corrected together. A regime with fewer pairs
    than others is left out: only the pairs that all have can be compared at once."""
    most = max(len(comparison.pairs) for regime in compared for comparison in regime.figures.values())
    compared = [regime for regime in compared if len(regime.figures[FIGURES[0]].pairs) == most]
    together = jointly(compared)
    if not together:
        return
    alone = [
        (r.name, figure, v.name) for r in compared for figure, c in r.figures.items() for v in c.versus if v.told_apart
    ]
    remain = {(regime, figure, v.name) for regime, figure, v in together if v.told_apart}
    lost = [key for key in alone if key not in remain]
    pairs, left = together[0][2].pairs, len(alone) - len(lost)
    not_those = f"; not those of {_listed(lost)}" if lost else ""
    yield (
        f"Corrected for all {len(together)} comparisons of both figures in {_names(compared)} at once (those equal to "
        f"the last bit aside), over the {pairs} pairs that they share, {left} of {len(alone)} verdicts "
        f"remain{not_those}."
    )
    yield ""


def _names(compared: Sequence[Regime]) -> str:
    return ", ".join(f"`{regime.name}`" for regime in compared)


def _listed(keys: Sequence[tuple[str, str, str]]) -> str:
    return ", ".join(f"`{name}` in {regime} ({figure})" for regime, figure, name in keys)


def _glance_cell(v: Versus) -> str:
    if v.verdict == "equal":
        return "equal"
    text = interval_text(v.difference, sign="+")
    return f"**{text}**" if v.told_apart else text
