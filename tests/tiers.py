"""How much of the tests a run does: ``TREW_TESTS`` is quick, default or nightly; ``make`` sets it.

``default`` leaves out runs that repeat a mechanism with other values, which ``nightly`` adds: nothing is tested by them
alone but the values. ``quick`` draws the fewest examples; which files it has stands in the Makefile.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

TIERS = ("quick", "default", "nightly")
FEWEST = {"quick": 2, "default": 6}  # examples that stay, however few are left


def tier() -> str:
    """The tier asked for; a name that is none ends the run."""
    asked = os.environ.get("TREW_TESTS") or "default"
    if asked not in TIERS:
        raise pytest.UsageError(f"TREW_TESTS: got {asked!r}, accepts {', '.join(TIERS)}")
    return asked


def some(names: Iterable[Any], always: Collection[str], *, name: Any = str) -> list[Any]:
    """Cases for parametrize: those in ``always`` run in every tier, the others in the nightly one.

    A name in ``always`` that is no case is a mistake here.
    """
    cases = list(names)
    unknown = set(always) - {name(case) for case in cases}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return [case if name(case) in always else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def examples(most: int) -> int:
    """How many examples hypothesis draws where ``most`` is the nightly number: a quarter by default."""
    asked = tier()
    if asked == "nightly":
        return most
    return min(most, max(most // 4, FEWEST[asked])) if asked == "default" else min(most, FEWEST[asked])
