"""Draws a table of numbers as SVG text: one cell for each, darker where it is larger, and one marked in each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .svg import escaped, opened

_ROW, _TOP, _BOTTOM = 24, 40, 50
_DARKEST = 0.55  # of the fill: numbers stay legible on it, in light and dark


@dataclass(frozen=True, slots=True)
class ShadedRow:
    """The name at the left, the numbers, and the index of the one that is marked by a frame (None = none)."""

    name: str
    values: Sequence[float]
    marked: int | None = None


def shades(
    rows: Sequence[ShadedRow],
    columns: Sequence[str],
    *,
    title: str,
    x_label: str,
    width: int = 760,
    standalone: bool = True,
) -> str:
    """Returns a complete ``<svg>`` element. Every row has one number of at least 0 for each column; darkness is their
    share of the largest number of all rows. ``standalone`` includes the style, as for ``line_chart``."""
    if not rows or any(len(row.values) != len(columns) for row in rows):
        raise ValueError(f"rows: accepts at least one, each with {len(columns)} values, one for each column")
    # An SVG cannot measure text: a width by a mean character of the font.
    left = 24 + 6.6 * max(len(row.name) for row in rows)
    wide, bottom = (width - 14 - left) / len(columns), _TOP + _ROW * len(rows)
    height = bottom + _BOTTOM
    largest = max(value for row in rows for value in row.values) or 1.0
    parts = [opened(title, width=width, height=height, standalone=standalone)]
    parts.append(f'<text class="tc-ink tc-title" x="14" y="20">{escaped(title)}</text>')
    for i, row in enumerate(rows):
        parts += _cells(row, left=left, top=_TOP + _ROW * i, wide=wide, largest=largest)
    # ---- axis
    for i, column in enumerate(columns):
        parts.append(_middle("tc-muted", left + (i + 0.5) * wide, bottom + 18, column))
    parts.append(_middle("tc-muted", left + len(columns) * wide / 2, bottom + 38, x_label))
    return "".join([*parts, "</svg>"])


def _cells(row: ShadedRow, *, left: float, top: float, wide: float, largest: float) -> Iterator[str]:
    yield f'<text class="tc-ink" x="14" y="{top + _ROW / 2 + 4:.1f}">{escaped(row.name)}</text>'
    for i, value in enumerate(row.values):
        x, dark = left + i * wide, _DARKEST * value / largest
        yield (
            f'<rect class="tc-f0" x="{x + 1:.1f}" y="{top + 1:.1f}" width="{wide - 2:.1f}" height="{_ROW - 2}" '
            f'fill-opacity="{dark:.2f}"/>'
        )
        if i == row.marked:
            yield (
                f'<rect class="tc-whisker tc-s1" x="{x + 2:.1f}" y="{top + 2:.1f}" width="{wide - 4:.1f}" '
                f'height="{_ROW - 4}"/>'
            )
        yield _middle("tc-ink", x + wide / 2, top + _ROW / 2 + 4, f"{value:.3f}")


def _middle(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escaped(text)}</text>'
