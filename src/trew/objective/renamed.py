"""Refuses names that this room no longer has, with the new ones: an old program is told what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refuse(owner: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``. It raises AttributeError for every name, and for the old ones says the new name.

    >>> refuse("trew.objective.filter", {"Keep": "GroupFilter"})("Keep")
    Traceback (most recent call last):
    AttributeError: trew.objective.filter: Keep was renamed GroupFilter
    """

    def __getattr__(name: str) -> Any:
        raise AttributeError(message(owner, name, renamed))

    return __getattr__


def message(owner: str, name: str, renamed: Mapping[str, str]) -> str:
    """What the AttributeError for ``name`` of ``owner`` says."""
    if name in renamed:
        return f"{owner}: {name} was renamed {renamed[name]}"
    return f"{owner} has no attribute {name!r}"
