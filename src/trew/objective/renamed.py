"""Refuses names that this room no longer has and says the new ones, so that an old program knows what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refuse(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``: ImportError with the new name for the names in ``renamed``, else AttributeError.

    >>> refuse("trew.objective.filter", {"Keep": "GroupFilter"})("Keep")
    Traceback (most recent call last):
    ImportError: trew.objective.filter: Keep was renamed GroupFilter
    """

    def __getattr__(name: str) -> Any:
        if name in renamed:
            # ``from module import Keep`` replaces an AttributeError by "cannot import name", without the new name.
            raise ImportError(message(module, name, renamed))
        raise AttributeError(message(module, name, renamed))

    return __getattr__


def message(owner: str, name: str, renamed: Mapping[str, str]) -> str:
    """What the error for ``name`` of ``owner`` says."""
    if name in renamed:
        return f"{owner}: {name} was renamed {renamed[name]}"
    return f"{owner} has no attribute {name!r}"
