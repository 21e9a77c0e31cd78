"""How much of the tests a run does: ``TREW_TESTS`` is quick, default or nightly; ``make`` sets it.

``default`` leaves out runs that repeat a mechanism with other values, which ``nightly`` adds: nothing is tested by them
alone but the values. ``quick`` draws the fewest examples; which files it has stands in the Makefile.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

TIERS = ("quick", "default", "nightly")
FEWEST = {"quick": 2, "default": 3}  # examples that stay, however few are left


def tier() -> str:
    """The tier asked for; a name that is none ends the run."""
    asked = os.environ.get("TREW_TESTS") or "default"
    if asked not in TIERS:
        raise pytest.UsageError(f"TREW_TESTS: got {asked!r}, accepts {', '.join(TIERS)}")
    return asked


def some(names: Iterable[Any], always: Collection[str], *, name: Any = str) -> list[Any]:
    """Cases for parametrize: those in ``always`` run in every tier, the others in the nightly one.

    A tuple has the values of several arguments. A name in ``always`` that is no case is a mistake here.
    """
    cases = list(names)
    unknown = set(always) - {name(case) for case in cases}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return [
        case if name(case) in always
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for case in cases
    ]  # fmt: skip


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for parametrize: the first of every ``number`` run in every tier, the others in the nightly one."""
    return [pytest.param(case, marks=() if i % number == 0 else pytest.mark.nightly) for i, case in enumerate(cases)]


def thinned(*axes: Iterable[Any], keep: int) -> list[Any]:
    """All combinations for parametrize: one in ``keep`` runs in every tier, the others in the nightly one.

    Those that stay lie on diagonals, so that they meet each value of each axis; where they would not, that is a
    mistake here.
    """
    values = [list(axis) for axis in axes]
    every = list(itertools.product(*(range(len(axis)) for axis in values)))
    stay = {numbers for numbers in every if sum(numbers) % keep == 0}
    for at, axis in enumerate(values):
        assert {numbers[at] for numbers in stay} == set(range(len(axis))), f"values of axis {at} would never run"
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(values, numbers, strict=True)),
            marks=() if numbers in stay else pytest.mark.nightly,
        )
        for numbers in every
    ]


def examples(most: int) -> int:
    """How many examples hypothesis draws where ``most`` is the nightly number: a quarter by default."""
    asked = tier()
    if asked == "nightly":
        return most
    return min(most, max(most // 4, FEWEST[asked])) if asked == "default" else min(most, FEWEST[asked])
