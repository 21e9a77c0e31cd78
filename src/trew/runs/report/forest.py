"""Draws forest plots as SVG text: one row for each difference, with its interval around a line at 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .svg import escaped, labels, opened, ticks
from .text import ends_of

_ROW, _TOP, _BOTTOM = 30, 40, 44
_CLOSE = 20
"""The height of a row without text at its right."""
_GAP = 30
"""Between the axes of two panels."""


@dataclass(frozen=True, slots=True)
class ForestRow:
    """A difference, the ends of its interval (nan = none), and what is said about it at the right. ``hollow``: the
    point is a ring."""

    name: str
    value: float
    low: float
    high: float
    text: str = ""
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values lie between ``left`` and ``right``; those outside of ``ends`` lie at its ends."""

    left: float
    right: float
    ends: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.ends
        return self.left + (min(max(value, low), high) - low) / (high - low) * (self.right - self.left)

    def draw(self, top: int, bottom: int) -> Iterator[str]:
        at = ticks(*self.ends, most=max(2, int(self.right - self.left) // 60))
        for value, label in zip(at, labels(at), strict=True):
            x = f"{self.x(value):.1f}"
            yield f'<line class="tc-grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
            yield f'<text class="tc-muted" x="{x}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        zero = f"{self.x(0):.1f}"
        yield f'<line class="tc-axis" x1="{zero}" x2="{zero}" y1="{top - 6}" y2="{bottom}"/>'


def forest(rows: Sequence[ForestRow], *, title: str, x_label: str, width: int = 760, standalone: bool = True) -> str:
    """Returns a complete ``<svg>`` element. ``standalone`` includes the style, as for ``line_chart``."""
    # An SVG cannot measure text: widths by a mean character of the font.
    named = 20 + 6.6 * max(len(_short(r.name)) for r in rows)
    told = 20 + 6.4 * max(len(r.text) for r in rows)
    # Room for the names at the left and the verdicts at the right; the axis gets the rest.
    axis = _Axis(named, width - told, _ends(rows))
    bottom = _TOP + _ROW * len(rows)
    parts = [opened(title, width=width, height=bottom + _BOTTOM, standalone=standalone)]
    parts.append(f'<text class="tc-ink tc-title" x="14" y="20">{escaped(title)}</text>')
    parts += axis.draw(_TOP, bottom)
    parts.append(_below(x_label, (axis.left + axis.right) / 2, bottom))
    for i, row in enumerate(rows):
        y = _TOP + _ROW * (i + 0.5)
        parts.append(_name(row.name, y))
        parts += _interval(row, axis, y)
        parts.append(f'<text class="tc-muted" x="{axis.right + 14:.1f}" y="{y + 4:.1f}">{escaped(row.text)}</text>')
    return "".join([*parts, "</svg>"])


def forests(panels: Mapping[str, Sequence[ForestRow]], *, title: str, x_label: str, width: int = 960) -> str:
    """Returns forest plots next to each other, with their names above, as a complete ``<svg>`` element. All have the
    same axis and a row for each name in any of them, sorted."""
    names = sorted({row.name for rows in panels.values() for row in rows})
    ends = _ends([row for rows in panels.values() for row in rows])
    left = 20 + 6.6 * max(len(_short(name)) for name in names)
    step = (width - left - 14 + _GAP) / len(panels)
    top = _TOP + 18
    bottom = top + _CLOSE * len(names)
    parts = [opened(title, width=width, height=bottom + _BOTTOM)]
    parts.append(f'<text class="tc-ink tc-title" x="14" y="20">{escaped(title)}</text>')
    parts += [_name(name, top + _CLOSE * (j + 0.5)) for j, name in enumerate(names)]
    for i, (panel, rows) in enumerate(panels.items()):
        axis = _Axis(left + step * i, left + step * (i + 1) - _GAP, ends)
        middle = f"{(axis.left + axis.right) / 2:.1f}"
        parts.append(
            f'<text class="tc-ink" x="{middle}" y="{top - 12}" text-anchor="middle">{escaped(_short(panel))}</text>'
        )
        parts += axis.draw(top, bottom)
        for row in rows:
            parts += _interval(row, axis, top + _CLOSE * (names.index(row.name) + 0.5))
    parts.append(_below(x_label, (left + width - 14) / 2, bottom))
    return "".join([*parts, "</svg>"])


def _name(name: str, y: float) -> str:
    return f'<text class="tc-ink" x="14" y="{y + 4:.1f}">{escaped(_short(name))}</text>'


def _below(text: str, middle: float, bottom: int) -> str:
    return f'<text class="tc-muted" x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escaped(text)}</text>'


def _interval(row: ForestRow, axis: _Axis, y: float) -> Iterator[str]:
    if math.isfinite(row.low) and math.isfinite(row.high):
        low, high = axis.x(row.low), axis.x(row.high)
        yield (
            f'<path class="tc-whisker tc-s0" d="M{low:.1f} {y - 5:.1f}v10M{high:.1f} {y - 5:.1f}v10M{low:.1f} {y:.1f}'
            f'H{high:.1f}"/>'
        )
    look = "tc-ground tc-s0" if row.hollow else "tc-f0"
    ring = ' stroke-width="1.5"' if row.hollow else ""
    yield f'<circle class="{look}" cx="{axis.x(row.value):.1f}" cy="{y:.1f}" r="4.5"{ring}/>'


def _ends(rows: Sequence[ForestRow]) -> tuple[float, float]:
    """The ends of the axis: every interval and 0, with some room."""
    known = [v for r in rows for v in (r.value, r.low, r.high) if math.isfinite(v)]
    low, high = min(0.0, *known), max(0.0, *known)
    # 1 where everything is 0: an axis needs some length.
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _short(name: str) -> str:
    return ends_of(name, 40)
