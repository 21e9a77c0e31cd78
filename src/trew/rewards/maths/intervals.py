"""Intervals, which are lists of two ends: recognises them, makes them of bounds, intersects and joins them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from . import algebra
from .not_exact import NotExact
from .shapes import Answer, AnswerList, Named, Scalar, Shape, Union

INFINITY = algebra.variable("∞")

_Number = Fraction | float  # a float where it is infinite, and only there


class _Stretch(NamedTuple):
    """An interval of plain numbers, and whether its ends belong to it."""

    low: _Number
    low_in: bool
    high: _Number
    high_in: bool


# ------------------------------------------------------------------------------------------------------------- making


def everything() -> AnswerList:
    """All real numbers."""
    return AnswerList("()", (Answer(Scalar(algebra.negative(INFINITY))), Answer(Scalar(INFINITY))))


def up_to(bound: Answer, *, closed: bool) -> AnswerList:
    """Everything below ``bound``; with it, if ``closed``."""
    return AnswerList("(]" if closed else "()", (Answer(Scalar(algebra.negative(INFINITY))), bound))


def down_to(bound: Answer, *, closed: bool) -> AnswerList:
    """Everything above ``bound``; with it, if ``closed``."""
    return AnswerList("[)" if closed else "()", (bound, Answer(Scalar(INFINITY))))


def between(low: Answer, high: Answer, *, low_in: bool, high_in: bool) -> AnswerList:
    """Everything between two bounds; with those that are ``in``."""
    return AnswerList(("[" if low_in else "(") + ("]" if high_in else ")"), (low, high))


def all_but(points: tuple[Answer, ...]) -> Union:
    """All real numbers but some; raises NotExact for points that are no plain numbers."""
    values = [algebra.rational(p.shape.value) if isinstance(p.shape, Scalar) else None for p in points]
    numbers = sorted({value for value in values if value is not None})
    if None in values or not numbers:
        raise NotExact("points that are no plain numbers")
    ends = [algebra.negative(INFINITY), *map(algebra.number, numbers), INFINITY]
    return Union(
        tuple(Answer(AnswerList("()", (Answer(Scalar(a)), Answer(Scalar(b))))) for a, b in itertools.pairwise(ends))
    )


def without_points(span: Answer, points: Sequence[Answer]) -> Union | None:
    """An interval without some points, as the intervals between them; None where these are no plain numbers."""
    stretches, cuts = _spans(span), [_end(point) for point in points]
    if stretches is None or len(stretches) != 1 or None in cuts:
        return None
    [last], parts = stretches, list[_Stretch]()
    for cut in sorted({cut for cut in cuts if cut is not None and last.low <= cut <= last.high}):
        parts.append(_Stretch(last.low, last.low_in, cut, False))
        last = _Stretch(cut, False, last.high, last.high_in)
    # At an end of the interval nothing is left on that side of a point.
    spans = [part for part in (*parts, last) if part.low < part.high]
    return Union(tuple(map(_written, spans)))


def bounded_without(items: tuple[Answer, ...]) -> Named | None:
    """x > 2 and x ≠ 3, ±4: an interval without the points that others leave out; None for other conditions."""
    shapes = [item.shape for item in items if isinstance(item.shape, Named)]
    spans = [shape.item for shape in shapes if is_interval(shape.item)]
    others = [shape.item.shape for shape in shapes if isinstance(shape.item.shape, Union)]
    if len(spans) != 1 or len(others) != len(items) - 1 or len({shape.name for shape in shapes}) != 1 or not others:
        return None
    ends = [end for other in others for part in other.parts for end in _ends(part)]
    found = without_points(spans[0], [end for end in ends if _end(end) not in (float("inf"), -float("inf"))])
    return Named(shapes[0].name, Answer(found)) if found is not None else None


def _ends(part: Answer) -> tuple[Answer, ...]:
    return part.shape.items if isinstance(part.shape, AnswerList) else ()


def meeting(items: tuple[Answer, ...]) -> Named | None:
    """x > 2 and x < 5 as one interval; None for anything but an upper and a lower bound of the same name."""
    shapes = [item.shape for item in items if isinstance(item.shape, Named) and is_interval(item)]
    if not len(shapes) == len(items) == 2 or shapes[0].name != shapes[1].name:
        return None
    # Two bounds in the same direction share an entry, so that the other one is missing.
    bounds = {_infinite_ends(span): span for shape in shapes if isinstance(span := shape.item.shape, AnswerList)}
    upper, lower = bounds.get((True, False)), bounds.get((False, True))
    if upper is None or lower is None:
        return None
    return Named(shapes[0].name, Answer(AnswerList(lower.ends[0] + upper.ends[1], (lower.items[0], upper.items[1]))))


def merged(parts: Sequence[Answer]) -> list[Answer] | None:
    """Intervals with overlaps and touching ends joined, in order; None if the ends are not plain numbers."""
    spans: list[_Stretch] = []
    for part in parts:
        found = _spans(part)
        if found is None:
            return None
        spans += found
    return [_written(span) for span in _joined(spans)]


# ------------------------------------------------------------------------------------------------------------- asking


def is_interval(item: Answer) -> bool:
    """Whether it may be one: two things in round or square brackets, as they stand or under a name."""
    shape = _unnamed(item)
    return isinstance(shape, AnswerList) and len(shape.ends) == 2 and shape.ends != "{}" and len(shape.items) == 2


def may_be_point(item: Answer) -> bool:
    """Whether an interval may as well be a point: finite ends in round brackets, not under the name of a number."""
    shape = _unnamed(item)
    if isinstance(item.shape, Named) and not item.shape.name.startswith("("):
        return False
    return isinstance(shape, AnswerList) and shape.ends == "()" and not any(_infinite_ends(shape))


def _unnamed(item: Answer) -> Shape:
    return item.shape.item.shape if isinstance(item.shape, Named) else item.shape


def _infinite_ends(span: AnswerList) -> tuple[bool, ...]:
    """For each end, whether it is infinite."""
    return tuple(isinstance(i.shape, Scalar) and "∞" in i.shape.value.variables for i in span.items)


def _spans(part: Answer) -> list[_Stretch] | None:
    """A list as intervals of plain numbers, where each element of a set is an interval; None for other items."""
    shape = _unnamed(part)
    if not isinstance(shape, AnswerList) or shape.ends in (",", "∨", ":", "±"):
        return None
    ends = [end for item in shape.items if (end := _end(item)) is not None]
    if len(ends) != len(shape.items):
        return None
    if shape.ends == "{}":
        return [_Stretch(end, True, end, True) for end in ends]
    if len(ends) != 2:
        return None
    return [_Stretch(ends[0], shape.ends[0] == "[", ends[1], shape.ends[1] == "]")]


def _joined(spans: Sequence[_Stretch]) -> Iterator[_Stretch]:
    """The same numbers in the fewest intervals. In order of the low ends, each one meets the last or none before."""
    last: _Stretch | None = None
    # Sorted by lower end, a closed one first, so that each span can only touch the last one.
    for span in sorted(spans, key=lambda s: (s.low, not s.low_in)):
        if last is None:
            last = span
        # (1, 2) and (2, 3) leave out 2; with one of the ends closed nothing is left out.
        elif span.low < last.high or (span.low == last.high and (span.low_in or last.high_in)):
            high, high_in = max((last.high, last.high_in), (span.high, span.high_in))
            last = _Stretch(last.low, last.low_in, high, high_in)
        else:
            yield last
            last = span
    if last is not None:
        yield last


def _end(item: Answer) -> _Number | None:
    """An end as a number, infinity as a float; None if it is no plain number."""
    if not isinstance(item.shape, Scalar):
        return None
    value = item.shape.value
    if value.variables != {"∞"}:
        return algebra.rational(value)
    # Infinity is a variable to the algebra: -∞ and ∞ are recognised, 2∞ or ∞ + 1 are no ends.
    for sign in (1, -1):
        if algebra.same(value, algebra.multiply(algebra.number(sign), INFINITY)):
            return sign * float("inf")
    return None


def _written(span: _Stretch) -> Answer:
    return Answer(between(_bound(span.low), _bound(span.high), low_in=span.low_in, high_in=span.high_in))


def _bound(end: _Number) -> Answer:
    if isinstance(end, Fraction):
        return Answer(Scalar(algebra.number(end)))
    return Answer(Scalar(INFINITY if end > 0 else algebra.negative(INFINITY)))
