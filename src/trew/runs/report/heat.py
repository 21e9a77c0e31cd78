"""Draws how a run's scores are distributed: one column per step, darker where more of its completions are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from .svg import labels, opened, ticks
from .text import number

_COLUMNS, _ROWS = 100, 10
_TOP, _BOTTOM, _LEFT, _RIGHT = 34, 44, 62, 16


def heat_strip(
    scores: Mapping[int, np.ndarray], *, title: str, width: int = 1140, row_height: int = 20, standalone: bool = True
) -> str:
    """Returns a complete ``<svg>`` element; empty without any score. NaN stands for no verdict, which has its own row.

    Darkness is the share of a column's completions, relative to the largest share of all columns. Long runs have
    several consecutive steps in a column.
    """
    known = np.concatenate([*scores.values(), np.empty(0)])
    missing = bool(np.isnan(known).any())
    known = known[~np.isnan(known)]
    if not len(known):
        return ""
    # ---- rows by score, columns by step
    names, edges = _bins(known)
    rows = len(names) + missing
    columns = _columns(sorted(scores))
    height = _TOP + rows * row_height + _BOTTOM
    parts = [opened(title, width=width, height=height, standalone=standalone)]
    parts.append(f'<text class="tc-ink tc-title" x="14" y="20">{escape(title)}</text>')
    # ---- names of the rows: high scores above, those without a verdict below all others
    wide = (width - _LEFT - _RIGHT) / len(columns)
    labels: list[str] = [*names, "none"] if missing else [*names]
    for i, name in enumerate(labels):
        y = _TOP + (len(names) - 1 - i if i < len(names) else i) * row_height
        parts.append(f'<text class="tc-muted" x="{_LEFT - 6}" y="{y + row_height / 2 + 4:.1f}" text-anchor="end">'
                     f"{escape(name)}</text>")  # fmt: skip
    # ---- cells
    counts = [_counts([scores[step] for step in steps], edges) for steps in columns]
    # Shares, not counts: a column of fewer completions is as dark as others.
    darkest = max(float(own.max()) / max(int(own.sum()), 1) for own in counts)
    for at, (steps, own) in enumerate(zip(columns, counts, strict=True)):
        place = {"x": _LEFT + at * wide, "wide": wide, "row_height": row_height}
        parts += _cells(own, names, steps, darkest=darkest, **place)
    # ---- axis
    parts += _steps(columns, wide=wide, bottom=_TOP + rows * row_height, width=width)
    return "".join([*parts, "</svg>"])


def _bins(known: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names and lower edges of the rows: every value if they are few, else equal intervals between the extremes."""
    values = _apart(np.unique(known))
    if len(values) <= _ROWS:
        return _told_apart([float(value) for value in values]), values
    # Halves first: the difference of two extreme floats is infinite.
    edges = 2 * np.linspace(values[0] / 2, values[-1] / 2, _ROWS + 1)
    # The edges are no round numbers: to a decimal more, or 0.15 would be 0.1.
    gaps = labels([float(edge) for edge in edges], finer=1)
    return [f"≥ {gap}" for gap in gaps[:-1]], edges[:-1]


def _apart(values: np.ndarray) -> np.ndarray:
    """Sorted values without those that differ from the one before by rounding alone: 0.1 + 0.2 is 0.3."""
    # Halves: the difference of two extreme floats is infinite.
    gaps, sizes = np.diff(values / 2), np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    return values[np.append(True, gaps > 0.5e-9 * sizes)]


def _told_apart(values: Sequence[float]) -> list[str]:
    """A name for each value, with as many digits as it takes for no two to be equal."""
    names = ([number(value, digits) for value in values] for digits in range(3, 12))
    return next((found for found in names if len(set(found)) == len(found)), [repr(value) for value in values])


def _columns(steps: Sequence[int]) -> list[list[int]]:
    size = -(-len(steps) // _COLUMNS)
    return [list(steps[i : i + size]) for i in range(0, len(steps), size)]


def _counts(of_steps: Sequence[np.ndarray], edges: np.ndarray) -> np.ndarray:
    """Completions per row, those without a verdict last."""
    values = np.concatenate(of_steps)
    judged = values[~np.isnan(values)]
    # The last edge at or below the value.
    rows = np.searchsorted(edges, judged, side="right") - 1
    # Values below the first edge by rounding count as in it.
    return np.append(np.bincount(rows.clip(min=0), minlength=len(edges)), len(values) - len(judged))


def _cells(
    counts: np.ndarray,
    names: Sequence[str],
    steps: Sequence[int],
    *,
    darkest: float,
    x: float,
    wide: float,
    row_height: int,
) -> Iterator[str]:
    total = int(counts.sum())
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    for i in counts.nonzero()[0].tolist():
        judged = i < len(names)
        y = _TOP + (len(names) - 1 - i if judged else i) * row_height
        what = f"score {names[i]}" if judged else "no verdict"
        # Never invisible: a single completion among thousands is still there.
        opacity = max(0.04, counts[i] / total / darkest)
        yield (
            f'<rect class="{"tc-f0" if judged else "tc-f7"}" x="{x:.1f}" y="{y + 1}" width="{max(wide - 1, 0.5):.1f}" '
            f'height="{row_height - 2}" fill-opacity="{opacity:.2f}">'
            f"<title>{escape(f'{when}: {counts[i]} of {total} completions, {what}')}</title></rect>"
        )


def _steps(columns: Sequence[Sequence[int]], *, wide: float, bottom: float, width: int) -> Iterator[str]:
    """The axis: the numbers of some steps below their columns."""
    first, last = columns[0][0], columns[-1][-1]
    for value in ticks(first, last, most=max(2, width // 120), whole=True) if last > first else (first,):
        # The column that has this step.
        at = next((i for i, steps in enumerate(columns) if steps[-1] >= value), len(columns) - 1)
        x = _LEFT + (at + 0.5) * wide
        yield _centred(x, bottom + 16, number(int(value)))
    yield _centred((_LEFT + width) / 2, bottom + 33, "step")


def _centred(x: float, y: float, text: str) -> str:
    return f'<text class="tc-muted" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
