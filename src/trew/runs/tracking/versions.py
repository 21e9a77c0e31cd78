"""Versions of packages."""

from __future__ import annotations

import re


def parts(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.16.0rc1 -> (2, 16); 2.16 and 2.16.0 are one."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", numbers[0]).split(".")) if numbers else ()
