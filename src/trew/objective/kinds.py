"""What an objective may be made of: on every axis components of one kind, which say their equation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from ..errors import nearest
from .adjust import Adjust
from .advantage import Advantage
from .aggregate import Aggregate
from .component import Component
from .correction import Correction
from .divergence import Divergence
from .entropy_bonus import EntropyBonus
from .filter import GroupFilter, LossMask, TokenMask
from .likelihood import CorrectLikelihood
from .ratio import Ratio
from .shaping import Shape
from .weight import Weight

ONE: dict[str, type] = {
    "advantage": Advantage, "weight": Weight, "aggregate": Aggregate, "ratio": Ratio, "entropy_bonus": EntropyBonus,
    "nll": CorrectLikelihood,
}  # fmt: skip
"""Axes that hold one component, and its class."""

SEVERAL: dict[str, type] = {
    "keep": GroupFilter, "shape": Shape, "adjust": Adjust, "prune": LossMask, "select": TokenMask,
    "correction": Correction, "divergence": Divergence,
}  # fmt: skip
"""Axes that hold a tuple of components."""


def refuse_other_kinds(objective: Any) -> None:
    """Raises ValueError for the first axis of ``objective`` that holds something else than its components."""
    for axis, kind in ONE.items():
        if problem := _problem(type(chosen := getattr(objective, axis)), kind):
            raise ValueError(f"{axis}: got {chosen!r}{problem}")
    for axis, kind in SEVERAL.items():
        if not isinstance(chosen := getattr(objective, axis), tuple):
            raise ValueError(f"{axis}: got {chosen!r}, accepts a tuple of components, () for none")
        for component in chosen:
            if problem := _problem(type(component), kind):
                raise ValueError(f"{axis}: got {component!r}{problem}")


@cache  # objectives are made often, of few classes
def _problem(given: type, kind: type) -> str:
    """Why an object of the class ``given`` is no component of ``kind``; empty if it is one."""
    # By ancestry: as protocols, several kinds have the same methods, and a function has __call__ as well.
    if kind not in given.__mro__:
        it = "call the class" if issubclass(given, type) else "derive a class from it"
        return f", accepts an object of a class derived from {kind.__module__}.{kind.__name__}: {it}"
    if getattr(given, "equation", None) is Component.equation:
        return ": its class has no equation(self), which returns the choice as one line of text; add it"
    return ""


def refuse_unknown(choices: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for the first of ``choices`` that is no field of an objective, with the nearest one.

    >>> refuse_unknown(["wieght"], ["name", "weight"])
    Traceback (most recent call last):
    ValueError: wieght: is no part of an objective (did you mean 'weight'?); accepts name, weight
    """
    fields = [*known]
    for name in choices:
        if name not in fields:
            raise ValueError(f"{name}: is no part of an objective{nearest(name, fields)}; accepts {', '.join(fields)}")
