"""Draws line charts as SVG text: axes, ticks, legend, bands and whiskers; no dependency, no script.

Honest by default: smooths only on request, shows a missing or non-finite value as a gap in the line, and keeps the
lowest and the highest point of every block when it thins a long series.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from .text import ends_of, visible

Values = Sequence[float | None]

_LIGHT = ("#0b62c4", "#c2410c", "#15803d", "#8b2fc9", "#a16207", "#be185d", "#0e7490", "#57534e")
_DARK = ("#62a8ff", "#ff9a5c", "#5fd07f", "#cf93ff", "#e6c04d", "#ff86b5", "#54cfe0", "#c8c2bc")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")  # a second cue besides colour: for print and for colour-blind readers


def _palette(colours: Sequence[str], ground: str, ink: str, muted: str, grid: str) -> str:
    rules = [f".tc-ground{{fill:{ground}}}.tc-ink{{fill:{ink}}}.tc-muted{{fill:{muted}}}"]
    rules.append(f".tc-grid{{stroke:{grid}}}.tc-axis{{stroke:{muted}}}")
    rules += [f".tc-s{i}{{stroke:{c};color:{c}}}.tc-f{i}{{fill:{c}}}" for i, c in enumerate(colours)]
    return "".join(rules)


CSS = (
    ".tc{font-family:system-ui,sans-serif;font-size:12px}.tc-title{font-size:13px;font-weight:600}"
    ".tc-line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".tc-faint{stroke-width:1.2;stroke-opacity:.35}.tc-band{fill-opacity:.16;stroke:none}"
    ".tc-whisker{fill:none;stroke-width:1.5}"
    + _palette(_LIGHT, "#ffffff", "#1f2328", "#59636e", "#e4e8ec")
    + "@media (prefers-color-scheme:dark){"
    + _palette(_DARK, "#14181d", "#e6edf3", "#9aa5b1", "#2b323a")
    + "}"
)
"""The style of all charts. A standalone chart includes it; a page with many charts includes it once."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line (or a row of points) with its name in the legend. ``low`` and ``high`` are the ends of an interval at
    each x, drawn as a band around a line or as whiskers on points. None and nan are gaps.
    """

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    style: Literal["line", "points", "faint"] = "line"
    colour: int | None = None  # index in the palette; None = the next one
    dash: str | None = None  # the line's stroke-dasharray; None = the colour's own, "" = solid
    thickness: float | None = None  # the line's width; None = the default. Wider lines stay visible under others

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(f"series {self.name!r}: got {len(values)} values of {name} for {len(self.x)} of x")


def opened(title: str, *, width: int, height: int, standalone: bool = True) -> str:
    """Returns the opening tag of a chart with its ground, and with the style if it is ``standalone``. Screen readers
    read the title; nothing draws it."""
    style = f"<style>{CSS}</style>" if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tc" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escaped(title)}">{style}'
        f'<rect class="tc-ground" width="{width}" height="{height}" rx="6"/>'
    )


def escaped(text: str) -> str:
    """Returns ``text`` for the inside of an element or an attribute, with its invisible characters shown."""
    return escape(visible(text))


def running_mean(y: Values, *, window: int, steps: Sequence[int] | None = None) -> list[float | None]:
    """At each known value, the mean of the last ``window`` known values; with ``steps``, which the values are of, the
    mean of those of the last ``window`` steps: between the values of a metric that few steps have, many may lie.

    >>> running_mean([1.0, 3.0, None, 5.0], window=2)
    [1.0, 2.0, None, 4.0]
    >>> running_mean([1.0, 3.0, 5.0], window=2, steps=[1, 2, 12])
    [1.0, 2.0, 5.0]
    """
    last: list[tuple[int, float]] = []
    means: list[float | None] = []
    for i, value in enumerate(y):
        if not _known(value):
            means.append(None)
            continue
        last = [*last, (i if steps is None else steps[i], float(value))][-window:]  # type: ignore[arg-type]
        if steps is not None:
            last = [(step, known) for step, known in last if step > last[-1][0] - window]
        means.append(sum(known for _, known in last) / len(last))
    return means


def line_chart(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "",
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    width: int = 560,
    height: int = 280,
    standalone: bool = True,
) -> str:
    """Returns a complete ``<svg>`` element. ``x_range`` and ``y_range`` fix an axis (accuracy: 0 to 1); by default the
    data do. ``standalone`` includes the style; pass False on a page that has ``CSS`` already.
    """
    series = [_thin(s, 2 * width) for s in series]  # more points than half pixels would only make the page larger
    frame = _frame(
        series, x_range, y_range, width, height, title=bool(title), y_label=bool(y_label), x_label=bool(x_label)
    )
    # ---- ground and title
    parts = [opened(title or y_label or "chart", width=width, height=frame.height, standalone=standalone)]
    if title:
        parts.append(f'<text class="tc-ink tc-title" x="{frame.left}" y="20">{escaped(title)}</text>')
    # ---- axes, then series above them, then the legend
    parts += _axes(frame, x_label, y_label)
    colours = [s.colour if s.colour is not None else i for i, s in enumerate(series)]
    for s, colour in zip(series, colours, strict=True):
        parts += _draw(s, colour, frame)
    parts += _legend(series, colours, left=frame.left, right=frame.right, bottom=frame.height - 10)
    # An empty chart says so: it might be taken for a line at 0.
    if not any(True for s in series for _ in _points(s)):
        x, y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
        parts.append(f'<text class="tc-muted" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">no values</text>')
    return "".join([*parts, "</svg>"])


def side_by_side(
    charts: Sequence[str], *, width: int, height: int, title: str, legend: Sequence[Series], note: str = ""
) -> str:
    """Puts charts of one size next to each other under one title, with one legend for all and a line of small print.

    The charts are ``width`` by ``height``, made with ``standalone=False`` and series without names.
    """
    total = width * len(charts)
    rows = _legend_rows([s.name for s in legend], total - 32)
    bottom = 30 + height + 18 * len(rows) + (18 if note else 0) + 8
    parts = [opened(title, width=total, height=bottom)]
    parts.append(f'<text class="tc-ink tc-title" x="16" y="20">{escaped(title)}</text>')
    parts += [f'<g transform="translate({width * i} 30)">{chart}</g>' for i, chart in enumerate(charts)]
    colours = [s.colour if s.colour is not None else i for i, s in enumerate(legend)]
    parts += _legend(legend, colours, left=16, right=total - 16, bottom=bottom - (26 if note else 8))
    if note:
        parts.append(f'<text class="tc-muted" x="16" y="{bottom - 9}" font-size="11">{escaped(note)}</text>')
    return "".join([*parts, "</svg>"])


# ---------------------------------------------------------------------------------------------------------- the frame


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    right: float
    top: float
    bottom: float
    height: int
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_ends: tuple[float, float]
    y_ends: tuple[float, float]

    def x(self, value: float) -> float:
        lo, hi = self.x_ends
        return self.left + _share(value, lo, hi) * (self.right - self.left)

    def y(self, value: float) -> float:
        lo, hi = self.y_ends
        value = min(max(value, lo), hi)  # clamps values outside a fixed range to its edge
        return self.bottom - _share(value, lo, hi) * (self.bottom - self.top)


def _share(value: float, low: float, high: float) -> float:
    """The position of ``value`` between ``low`` and ``high``, 0 to 1."""
    if math.isinf(high - low):  # the range overflows a float, a quarter of it does not
        value, low, high = value / 4, low / 4, high / 4
    return (value - low) / (high - low)


def _frame(
    series: Sequence[Series],
    x_range: tuple[float, float] | None,
    y_range: tuple[float, float] | None,
    width: int,
    height: int,
    *,
    title: bool,
    y_label: bool,
    x_label: bool,
) -> _Frame:
    xs, ys = _extent(series)
    x_ends = x_range or _ends(xs, pad=0.0)
    y_ends = y_range or _ends(ys, pad=0.06)  # a line along the frame's edge would be hard to see
    x_ticks = ticks(*x_ends, most=max(2, width // 90), whole=all(float(x).is_integer() for x in xs))
    y_ticks = ticks(*y_ends, most=max(2, height // 48))
    top = (34 if title else 12) + (18 if y_label and not title else 0)
    left = 14 + 7.0 * max(len(label) for label in labels(y_ticks))  # an SVG cannot measure text: 7 px per character
    # The legend's rows come below the chart, which keeps its height.
    legend = len(_legend_rows([s.name for s in series if s.name], width - left - 16))
    bottom = height - (40 if x_label else 24)
    return _Frame(
        left, width - 16, top, bottom, height + 18 * legend + (6 if legend else 0), x_ticks, y_ticks, x_ends, y_ends
    )


def _extent(series: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Every x, and every y with the ends of the intervals, that the chart must have room for."""
    points = [point for s in series for point in _points(s)]
    return [x for x, *_ in points], [y for _, *ys in points for y in ys if y is not None]


def _ends(values: Sequence[float], *, pad: float) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = float(min(values)), float(max(values))
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant up to rounding: pad in proportion to its size
        room = 0.1 * max(abs(low), abs(high))
        return (_held(low - room), _held(high + room)) if room else (0.0, 1.0)
    # Not pad * (high - low): the difference of two extreme floats overflows.
    room = high * pad - low * pad
    # Padding must not suggest that shares and lengths can be negative.
    return (0.0 if low >= 0 > low - room else _held(low - room)), _held(high + room)


def _held(value: float) -> float:
    """Clamps to the range of finite floats."""
    return min(max(value, -sys.float_info.max), sys.float_info.max)


def ticks(low: float, high: float, *, most: int, whole: bool = False) -> tuple[float, ...]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``, at most ``most`` + 1.

    >>> ticks(0.0, 1.0, most=5)
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    # Divided first: the difference of two extreme floats overflows.
    gap = high / most - low / most
    if not sys.float_info.min * 1e14 < gap < math.inf:  # smaller powers of ten are not exact
        return low, high
    # The power of ten below the gap, then 1, 2, 5, 10 or 20 times that: the first that is wide enough.
    step = 10.0 ** math.floor(math.log10(gap))
    step *= next(m for m in (1, 2, 5, 10, 20) if gap / (step * m) <= 1)
    if whole:
        step = max(1.0, step)
    # With some tolerance: 0.3 / 0.1 is a little less than 3.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if whole and first >= last and math.ceil(low) <= math.floor(high):  # the first and the last, which may be one
        return tuple(dict.fromkeys((float(math.ceil(low)), float(math.floor(high)))))
    if not 0 < last - first <= 2 * most:  # the range is narrower than the precision of its numbers
        return low, high
    # Without the last bits of i * step; + 0.0 makes -0.0 a 0.
    return tuple(round(i * step, 12 - math.floor(math.log10(step))) + 0.0 for i in range(first, last + 1))


def labels(values: Sequence[float], *, finer: int = 0) -> list[str]:
    """One label per tick, all with the same number of decimals; powers of ten for very large and very small values.
    ``finer``: more decimals than tell neighbours apart, for values that are no round numbers.

    >>> labels([0.0, 0.5, 1.0]), labels([0.0, 20000.0, 40000.0]), labels([0.0, 2e-6])
    (['0.0', '0.5', '1.0'], ['0', '20k', '40k'], ['0', '2e-6'])
    """
    largest = max(map(abs, values), default=0.0)
    # The smallest distance decides how many digits tell neighbours apart.
    gap = _held(min((b - a for a, b in itertools.pairwise(values)), default=largest or 1.0)) or largest
    gap *= 10.0**-finer
    if largest >= 1e7 or 0 < largest < 1e-3:
        # As many digits as it takes to tell neighbouring ticks apart.
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(gap) + 1e-9))
        return ["0" if v == 0 else _power(v, digits) for v in values]
    if largest >= 1e4:
        return _in_thousands(values, gap)
    # Decimals of the gap, which is 1, 2 or 5 times a power of ten: neighbours then differ.
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    return [f"{v:.{decimals}f}" for v in values]


def _in_thousands(values: Sequence[float], gap: float) -> list[str]:
    decimals = max(0, 3 - math.floor(math.log10(gap) + 1e-9)) if gap < 1000 else 0
    return ["0" if v == 0 else f"{v / 1000:.{decimals}f}k" for v in values]


def _power(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if digits else mantissa}e{int(exponent)}"


def _axes(f: _Frame, x_label: str, y_label: str) -> Iterator[str]:
    for value, label in zip(f.y_ticks, labels(f.y_ticks), strict=True):
        y = f.y(value)
        yield f'<line class="tc-grid" x1="{f.left:.1f}" x2="{f.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tc-muted" x="{f.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<line class="tc-axis" x1="{f.left:.1f}" x2="{f.right:.1f}" y1="{f.bottom:.1f}" y2="{f.bottom:.1f}"/>'
    for value, label in zip(f.x_ticks, labels(f.x_ticks), strict=True):
        x = f.x(value)
        yield f'<line class="tc-axis" x1="{x:.1f}" x2="{x:.1f}" y1="{f.bottom:.1f}" y2="{f.bottom + 4:.1f}"/>'
        yield f'<text class="tc-muted" x="{x:.1f}" y="{f.bottom + 17:.1f}" text-anchor="middle">{label}</text>'
    if x_label:
        x, y = (f.left + f.right) / 2, f.bottom + 33
        yield f'<text class="tc-muted" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escaped(x_label)}</text>'
    if y_label:
        yield f'<text class="tc-muted" x="{f.right:.1f}" y="20" text-anchor="end">{escaped(y_label)}</text>'


# --------------------------------------------------------------------------------------------------------- the series


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _points(s: Series) -> Iterator[tuple[float, float | None, float | None, float | None]]:
    """(x, y, low, high) where y is known."""
    for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
        if _known(y) and math.isfinite(x):
            low = s.low[i] if s.low is not None else None
            high = s.high[i] if s.high is not None else None
            yield x, y, low if _known(low) else None, high if _known(high) else None


def _stretches(s: Series) -> list[list[int]]:
    """The indices of each stretch between gaps."""
    pieces: list[list[int]] = [[]]
    for i, y in enumerate(s.y):
        if _known(y) and math.isfinite(s.x[i]):
            pieces[-1].append(i)
        elif pieces[-1]:
            pieces.append([])
    return [p for p in pieces if p]


def _thin(s: Series, most: int) -> Series:
    """Thins to about ``most`` points: the lowest and the highest of every block of neighbours, and the gaps."""
    n = len(s.x)
    if n <= most:
        return s
    # Two points of each block are kept, so blocks are twice as long.
    size = math.ceil(2 * n / most)
    keep: set[int] = {0, n - 1}
    for start in range(0, n, size):
        keep |= _telling(s.y, range(start, min(start + size, n)))
    order = sorted(keep)

    def cut(values: Values | None) -> list[float | None] | None:
        return None if values is None else [values[i] for i in order]

    x = [s.x[i] for i in order]
    return dataclasses.replace(s, x=x, y=cut(s.y) or [], low=cut(s.low), high=cut(s.high))


def _telling(y: Values, block: range) -> set[int]:
    """The indices of a block that thinning must keep: its lowest and highest value, and its gaps."""
    known = {i: value for i in block if (value := y[i]) is not None and math.isfinite(value)}
    keep = set(block) - known.keys()
    return keep | {min(known, key=known.__getitem__), max(known, key=known.__getitem__)} if known else keep


def _draw(s: Series, colour: int, f: _Frame) -> Iterator[str]:
    draw = _draw_points if s.style == "points" else _draw_line
    yield from draw(dataclasses.replace(s, dash=_pattern(s, colour)), colour % len(_LIGHT), f)


def _draw_points(s: Series, colour: int, f: _Frame) -> Iterator[str]:
    for x, y, low, high in _points(s):
        assert y is not None
        if low is not None and high is not None:
            at, a, b = f.x(x), f.y(low), f.y(high)
            yield (
                f'<path class="tc-whisker tc-s{colour}" d="M{at - 4:.1f} {a:.1f}h8M{at - 4:.1f} {b:.1f}h8'
                f'M{at:.1f} {a:.1f}V{b:.1f}"/>'
            )
        yield f'<circle class="tc-f{colour}" cx="{f.x(x):.1f}" cy="{f.y(y):.1f}" r="4"/>'


def _draw_line(s: Series, colour: int, f: _Frame) -> Iterator[str]:
    for piece in _stretches(s):
        # The band first, so that the line is above it.
        yield from _band(s, [i for i in piece if _has_band(s, i)], colour, f)
        points = [(f.x(s.x[i]), f.y(s.y[i] or 0.0)) for i in piece]
        # A path of one point would not show.
        if len(points) == 1:
            yield f'<circle class="tc-f{colour}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5"/>'
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        faint = " tc-faint" if s.style == "faint" else ""
        yield f'<path class="tc-line tc-s{colour}{faint}"{_dash(s)}{_thickness(s)} d="M{path}"/>'


def _has_band(s: Series, i: int) -> bool:
    return s.low is not None and s.high is not None and _known(s.low[i]) and _known(s.high[i])


def _band(s: Series, piece: list[int], colour: int, f: _Frame) -> Iterator[str]:
    if len(piece) < 2 or s.low is None or s.high is None:
        return
    # Along the upper ends, and back along the lower ones.
    there = [f"{f.x(s.x[i]):.1f} {f.y(s.high[i] or 0.0):.1f}" for i in piece]
    back = [f"{f.x(s.x[i]):.1f} {f.y(s.low[i] or 0.0):.1f}" for i in reversed(piece)]
    yield f'<path class="tc-band tc-f{colour}" d="M{"L".join(there + back)}Z"/>'


def _pattern(s: Series, colour: int) -> str:
    """The series' own dash, or that of its colour: where colours begin anew they have other dashes than before."""
    return _DASHES[(colour + colour // len(_LIGHT)) % len(_DASHES)] if s.dash is None else s.dash


def _dash(s: Series) -> str:
    return f' stroke-dasharray="{s.dash}"' if s.dash and s.style == "line" else ""


def _thickness(s: Series) -> str:
    return "" if s.thickness is None else f' style="stroke-width:{s.thickness:g}"'


# --------------------------------------------------------------------------------------------------------- the legend


def _legend_rows(names: Sequence[str], room: float) -> list[list[str]]:
    rows: list[list[str]] = []
    # Full, so that the first name begins a row.
    used = math.inf
    for name in names:
        need = _legend_width(name)
        if used + need > room:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += need
    return rows


def _legend_width(name: str) -> float:
    return 42 + 6.6 * len(_name(name))


def _name(name: str) -> str:
    return ends_of(name, 48)


def _legend(
    series: Sequence[Series], colours: Sequence[int], *, left: float, right: float, bottom: float
) -> Iterator[str]:
    named = [(s, c) for s, c in zip(series, colours, strict=True) if s.name]
    rows = _legend_rows([s.name for s, _ in named], right - left)
    entries = iter(named)
    for number, row in enumerate(rows):
        x, y = left, bottom - 18 * (len(rows) - 1 - number)
        for _ in row:
            s, colour = next(entries)
            c, s = colour % len(_LIGHT), dataclasses.replace(s, dash=_pattern(s, colour))
            if s.style == "points":
                yield f'<circle class="tc-f{c}" cx="{x + 9:.1f}" cy="{y - 4:.1f}" r="4"/>'
            else:
                faint = " tc-faint" if s.style == "faint" else ""
                yield f'<path class="tc-line tc-s{c}{faint}"{_dash(s)} d="M{x:.1f} {y - 4:.1f}h20"/>'
            yield f'<text class="tc-ink" x="{x + 26:.1f}" y="{y:.1f}">{escaped(_name(s.name))}</text>'
            x += _legend_width(s.name)
