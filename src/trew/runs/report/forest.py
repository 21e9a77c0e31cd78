"""Draws a forest plot as SVG text: one row for each difference, with its interval around a line at 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .svg import escaped, labels, opened, ticks

_ROW, _TOP, _BOTTOM = 30, 40, 44


@dataclass(frozen=True, slots=True)
class ForestRow:
    """A difference, the ends of its interval (nan = none), and what is said about it at the right."""

    name: str
    value: float
    low: float
    high: float
    text: str = ""


def forest(rows: Sequence[ForestRow], *, title: str, x_label: str, width: int = 760, standalone: bool = True) -> str:
    """Returns a complete ``<svg>`` element. ``standalone`` includes the style, as for ``line_chart``."""
    # An SVG cannot measure text: widths by a mean character of the font.
    named = 20 + 6.6 * max(len(_short(r.name)) for r in rows)
    told = 20 + 6.4 * max(len(r.text) for r in rows)
    left, right, height = named, width - told, _TOP + _ROW * len(rows) + _BOTTOM
    # Room for the names at the left and the verdicts at the right; the axis gets the rest.
    ends = _ends(rows)

    def x(value: float) -> float:
        return left + (min(max(value, ends[0]), ends[1]) - ends[0]) / (ends[1] - ends[0]) * (right - left)

    parts = [opened(title, width=width, height=height, standalone=standalone)]
    parts.append(f'<text class="tc-ink tc-title" x="14" y="20">{escaped(title)}</text>')
    bottom = _TOP + _ROW * len(rows)
    # ---- axis
    at = ticks(*ends, most=max(2, int(right - left) // 80))
    for value, label in zip(at, labels(at), strict=True):
        parts.append(f'<line class="tc-grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tc-muted" x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<line class="tc-axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{_TOP - 6}" y2="{bottom}"/>')
    middle = (left + right) / 2
    parts.append(
        f'<text class="tc-muted" x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escaped(x_label)}</text>'
    )
    # ---- a row for each difference
    for i, row in enumerate(rows):
        y = _TOP + _ROW * (i + 0.5)
        parts.append(f'<text class="tc-ink" x="14" y="{y + 4:.1f}">{escaped(_short(row.name))}</text>')
        parts += _interval(row, x, y)
        parts.append(f'<text class="tc-muted" x="{right + 14:.1f}" y="{y + 4:.1f}">{escaped(row.text)}</text>')
    return "".join([*parts, "</svg>"])


def _interval(row: ForestRow, x: Callable[[float], float], y: float) -> Iterator[str]:
    if math.isfinite(row.low) and math.isfinite(row.high):
        low, high = x(row.low), x(row.high)
        yield (
            f'<path class="tc-whisker tc-s0" d="M{low:.1f} {y - 5:.1f}v10M{high:.1f} {y - 5:.1f}v10M{low:.1f} {y:.1f}'
            f'H{high:.1f}"/>'
        )
    yield f'<circle class="tc-f0" cx="{x(row.value):.1f}" cy="{y:.1f}" r="4.5"/>'


def _ends(rows: Sequence[ForestRow]) -> tuple[float, float]:
    """The ends of the axis: every interval and 0, with some room."""
    known = [v for r in rows for v in (r.value, r.low, r.high) if math.isfinite(v)]
    low, high = min(0.0, *known), max(0.0, *known)
    # 1 where everything is 0: an axis needs some length.
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
