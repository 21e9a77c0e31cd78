"""``Component``: what all choices of an objective have in common, and the checks of their numbers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

Scope = Literal["token", "sequence", "group", "batch"]
"""The smallest set of tokens that must be seen together for a component to be exact."""

SCOPES: tuple[Scope, ...] = ("token", "sequence", "group", "batch")
"""All scopes, the smallest first."""


@runtime_checkable
class Component(Protocol):
    """One choice: a frozen value that declares what it reads. Subclasses are frozen dataclasses.

    ``needs`` names the optional fields of ``TokenBatch`` without which it cannot be computed; ``scope`` is the smallest
    set of tokens that it must see together.
    """

    scope: ClassVar[Scope] = "token"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A component that still declares the old name would pass for one that needs no company: cut into parts, it
        # would train with a wrong gradient, silently.
        if "couples" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: couples was renamed scope; declare scope = {cls.__dict__['couples']!r}")
        scope = cls.__dict__.get("scope", "token")
        if isinstance(scope, str) and scope not in SCOPES:  # no text: a field or a property, known once it is made
            raise TypeError(f"{cls.__name__}: got scope = {scope!r}, accepts {', '.join(map(repr, SCOPES))}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def equation(self) -> str:
        """The choice as one line of text, with its numbers filled in."""
        ...


def positive(**values: float) -> None:
    """Raises ValueError for the first of ``values`` that is not above 0."""
    for name, value in values.items():
        # ``not``, here and below: NaN fails every comparison, and is refused so.
        if not value > 0:
            raise ValueError(f"{name}: got {value!r}, accepts a number above 0")


def not_negative(**values: float) -> None:
    """Raises ValueError for the first of ``values`` that is not 0 or above and finite."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}: got {value!r}, accepts 0 or more")


def share_of(**values: float) -> None:
    """Raises ValueError for the first of ``values`` that is not from 0 to 1, with the conversion of percentages."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            percent = f"; if {value:g} % is meant, pass {value / 100:g}" if 1 < value <= 100 else ""
            raise ValueError(f"{name}: got {value!r}, accepts a number from 0 to 1{percent}")


def ratio_cap(**values: float) -> None:
    """Raises ValueError for the first of ``values`` that would scale down a policy that has not moved: below 1.

    Libraries that write the cap as 1 + eps name eps: their 0.2 is a cap of 1.2 here.
    """
    for name, value in values.items():
        if not value >= 1:
            counted = f"; where {value:g} counts from 1, as in verl, pass {1 + value:g}" if value > 0 else ""
            raise ValueError(f"{name}: got {value!r}, accepts 1 or more, since it bounds the ratio itself{counted}")


def one_of(choices: tuple[str, ...], **values: str) -> None:
    """Raises ValueError for the first of ``values`` that is none of ``choices``."""
    for name, value in values.items():
        if value not in choices:
            *most, last = map(repr, choices)
            raise ValueError(f"{name}: got {value!r}, accepts {', '.join(most)} or {last}")
