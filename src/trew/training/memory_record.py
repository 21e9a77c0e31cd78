"""Memory that a run was expected to need and what it held, by process and phase: memory.json in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runs import RunFolder
from ..utils.memory import Peaks
from .team import Team

GENERATING, TRAINING, BETWEEN, EXPORTING = "generating", "training", "between", "exporting"
"""Phases after loading. ``between``: evaluations, checkpoints, publishing weights."""
GROWN = 1.01
"""The file is written again when a peak has grown by this factor: after the first steps hardly ever."""


class MemoryRecord:
    """Measures this process, collects the peaks of the other ranks, and writes both beside the estimate."""

    def __init__(self, folder: RunFolder, planned: Mapping[str, Any], peaks: Peaks) -> None:
        self.peaks = peaks
        self._folder, self._planned = folder, planned
        self._written: dict[str, int] = {}

    def begin(self) -> None:
        """Writes the estimate, before anything is loaded."""
        self._write([])

    def update(self, team: Team, *, end: bool = False) -> None:
        """Writes what every rank has held so far, if this one holds more than before or the run ends."""
        now = dict(self.peaks.phases)
        if end or any(size > GROWN * self._written.get(phase, 0) for phase, size in now.items()):
            self._written = now
            self._write(team.memory({"phases": now, "most": self.peaks.most}))

    def _write(self, ranks: list[dict[str, Any]]) -> None:
        measured = [
            {"who": f"rank {rank}", "memory": found["phases"], "peak_bytes": found["most"]}
            for rank, found in enumerate(ranks)
        ]
        self._folder.write_memory({"planned": self._planned, "measured": measured})
