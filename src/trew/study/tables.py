"""Tables of a study's report, and how numbers stand in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..eval.statistics import Interval

Table = list[list[str]]


def markdown(table: Table) -> Iterator[str]:
    head, *rows = table
    yield from (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def aligned(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in table]


def interval_text(interval: Interval, *, sign: str = "", digits: int = 3) -> str:
    # + 0.0: what rounds to 0 has no sign of its own.
    mean, low, high = (f"{round(x, digits) + 0.0:{sign}.{digits}f}" for x in interval)
    return f"{mean} [{low}, {high}]" if math.isfinite(interval.low) else f"{mean} [no interval]"


def p_text(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def mean_text(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3g}" if known else "–"


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
