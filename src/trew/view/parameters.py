"""The parameters of a request, each checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from .answers import BadRequest

_LARGEST = 2**53


class Parameters:
    """``path``: what the address names. The other values come from its query; an empty one counts as not given."""

    def __init__(self, query: Any, path: Mapping[str, str]) -> None:
        self.path = path
        self._query = query

    def text(self, name: str, default: str = "") -> str:
        return self._query.get(name) or default

    def all(self, name: str) -> list[str]:
        return [value for value in self._query.getlist(name) if value]

    def names(self, name: str) -> frozenset[str]:
        """Names separated by commas."""
        return frozenset(part for part in self.text(name).split(",") if part)

    def whole(self, name: str, default: int | None = None, *, least: int = -1, most: int = _LARGEST) -> int:
        """A whole number; it must be given if there is no default."""
        found = self.maybe_whole(name, least=least, most=most)
        if found is None and default is None:
            raise BadRequest(f"{name}: is missing, accepts a whole number")
        return default if found is None else found  # type: ignore[return-value]

    def maybe_whole(self, name: str, *, least: int = -1, most: int = _LARGEST) -> int | None:
        given = self.text(name)
        if not given:
            return None
        # int() alone would accept blanks, underscores and digits of other scripts.
        if not given.removeprefix("-").isascii() or not given.removeprefix("-").isdecimal() or len(given) > 17:
            raise BadRequest(f"{name}: got {given[:50]!r}, accepts a whole number")
        if not least <= (number := int(given)) <= most:
            raise BadRequest(f"{name}: got {number}, accepts {least} to {most}")
        return number

    def number(self, name: str) -> float | None:
        given = self.text(name)
        if not given:
            return None
        try:
            number = float(given)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadRequest(f"{name}: got {given[:50]!r}, accepts a number")
        return number

    def flag(self, name: str) -> bool | None:
        """1 or 0; None if it is not given."""
        given = self.text(name)
        if given and given not in ("0", "1", "true", "false"):
            raise BadRequest(f"{name}: got {given[:50]!r}, accepts 1 or 0")
        return given in ("1", "true") if given else None

    def one_of(self, name: str, accepted: Collection[str], default: str) -> str:
        given = self.text(name, default)
        if given not in accepted:
            raise BadRequest(f"{name}: got {given[:50]!r}, accepts {', '.join(accepted)}")
        return given
