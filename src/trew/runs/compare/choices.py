"""What a comparison is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Allow = Literal["data", "eval", "model", "version", "changes", "one-seed"]
"""Differences between runs that are refused unless they are named."""

Unfinished = Literal["refuse", "leave-out", "count"]
"""What becomes of a run without a summary: it may be training still, or have failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options of ``trew compare`` that decide its numbers."""

    metric: str = "final"
    baseline: str = ""  # empty = the group of the first run
    by: tuple[str, ...] = ()  # the settings that make a group; empty = all that change what is learned
    allow: tuple[Allow, ...] = ()
    unfinished: Unfinished = "refuse"
