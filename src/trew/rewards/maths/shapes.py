r"""What an answer can be: a number or formula, words, a tuple, an interval, a set, a matrix, an equation …"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .algebra import Value
from .units import Unit


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number or formula, and the unit that it is in."""

    value: Value
    unit: Unit = ()


@dataclass(frozen=True, slots=True)
class Words:
    """Letters only: a name, yes, (C). ``text`` is in small letters without spaces and punctuation."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """An option with what it says, (A) 5. ``letter`` is a small one."""

    letter: str
    item: Answer


@dataclass(frozen=True, slots=True)
class AnswerList:
    """Several answers. ``ends`` is their brackets, ``()``, ``[)``, …: ordered; ``{}``: a set; ``,``: a bare list;
    ``∨``: a list with "or" in it; ``±``: both values of a formula with that sign; ``:``: a ratio."""

    ends: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Intervals and sets joined by ∪."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of answers."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Named:
    """``x = …``, ``f(x) = …``, ``x ∈ …``: the name as written, and what it is; ``equation`` is left minus right."""

    name: str
    item: Answer
    equation: Value | None = None


@dataclass(frozen=True, slots=True)
class Equation:
    """``difference`` = 0; of m + n = 5, which says what an expression comes to, ``total`` is the 5."""

    difference: Value
    total: Answer | None = None


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a number system: 52_8."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not read. ``readable``: it may be mathematics that exact algebra does not cover; ``too_large`` to compute."""

    why: str
    readable: bool = False
    too_large: bool = False


Shape = Scalar | Words | Choice | AnswerList | Union | Matrix | Named | Equation | Based | Unknown


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read, and the normalised ``text`` it was read from."""

    shape: Shape
    text: str = field(default="", compare=False)

    @property
    def plain(self) -> str:
        """The letters and digits of the text in small letters, to compare words with."""
        text = self.text.replace("\\text", "")
        return re.sub(r"[^\w]|_", "", text.casefold()) if "\\" not in text else ""
