"""Chains of quantities that are equal to each other: a = b = c, x = 2y = 3z."""

from __future__ import annotations

from collections.abc import Sequence

from . import algebra, formula
from .algebra import Value
from .not_exact import NotExact
from .shapes import Answer, AnswerList, Equation
from .tokens import Token

MAX_SIDE = 4
"""The tokens of a side: 3z, x_1, but no formula."""


def equal_quantities(sides: Sequence[list[Token]]) -> AnswerList | None:
    """The equations of three or more sides that are a multiple of a variable each, all of another one: of the first
    variable in the alphabet with every other. None for other chains, such as a derivation, A = lw = 2l^2.

    >>> from .tokens import tokenize
    >>> chain = equal_quantities([tokenize(side) for side in ("x", "2y", "3z")])
    >>> len(chain.items) if chain else 0, equal_quantities([tokenize(side) for side in ("x", "2y", "6")])
    (2, None)
    """
    if len(sides) < 3 or max(map(len, sides)) > MAX_SIDE:
        return None
    try:
        values = [formula.value(side) for side in sides]
    except NotExact:
        return None
    found = {_variable(value): value for value in values}
    if "" in found or len(found) < len(values):
        return None
    first, *others = (found[name] for name in sorted(found))
    return AnswerList(",", tuple(Answer(Equation(algebra.subtract(first, other))) for other in others))


def _variable(value: Value) -> str:
    """The variable that ``value`` is a multiple of; empty for another value."""
    names = value.variables
    if len(names) != 1 or value.opaque:
        return ""
    (name,) = names
    return name if algebra.rational(algebra.divide(value, algebra.variable(name))) is not None else ""
