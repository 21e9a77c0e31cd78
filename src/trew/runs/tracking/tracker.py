"""What an external tracker does, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Ending = Literal["finished", "failed", "interrupted"]
Rows = Sequence[tuple[int, Mapping[str, float]]]


class Tracker(Protocol):
    """A destination for metrics."""

    def begin(self) -> None:
        """Starts the tracker's run."""
        ...

    def catch_up(self, rows: Rows) -> None:
        """Records the rows from before a resume, unless the tracker has them."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records finite numbers by name."""
        ...

    def close(self, ending: Ending) -> None:
        """Flushes and ends the tracker's run, as far as it has begun."""
        ...


@dataclass(frozen=True)
class Subject:
    """What trackers are told of a run."""

    folder: Path
    name: str
    project: str
    config: dict[str, Any]
    note: Callable[[str], None]
