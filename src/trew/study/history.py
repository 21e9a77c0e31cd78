"""What was fixed before the first run, and what was changed after it: kept beside the runs, shown with the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.toml import flatten
from .design import Study
from .states import write_json

_FILE = "history.json"


@dataclass(frozen=True, slots=True)
class History:
    """Every design that runs were made under, in order: its digest, its content, and how many runs there were then."""

    folder: Path
    designs: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def read(folder: Path) -> History:
        try:
            found = json.loads((folder / _FILE).read_bytes())
        except (OSError, ValueError):
            found = []
        return History(folder, tuple(found))

    def note(self, study: Study, *, runs: int) -> list[str]:
        """Records the design if it is new; returns a line for each change since the last one that had runs."""
        own = {"digest": study.digest, "runs_before": runs, "design": study.to_json()}
        if self.designs and self.designs[-1]["digest"] == study.digest:
            return []
        # A design that no run was made under is no history: replaced as long as nothing has been seen.
        kept = [d for i, d in enumerate(self.designs) if self._had_runs(i, runs)]
        write_json(self.folder / _FILE, [*kept, own])
        return [f"changed after {runs} runs: {line}" for line in changes(kept[-1], own)] if kept else []

    @staticmethod
    def begin(folder: Path, study: Study, designs: Sequence[Mapping[str, Any]]) -> None:
        """Begins a folder's history with that of a study that goes on there, unless it has one of its own. A study
        whose design never changed has no designs but its own."""
        if not (folder / _FILE).exists():
            only = {"digest": study.digest, "runs_before": 0, "design": study.to_json()}
            write_json(folder / _FILE, list(designs) or [only])

    def _had_runs(self, number: int, now: int) -> bool:
        after = self.designs[number + 1]["runs_before"] if number + 1 < len(self.designs) else now
        return after > self.designs[number]["runs_before"]

    def lines(self) -> list[str]:
        """All changes after the first run."""
        return [
            f"after {new['runs_before']} runs: {line}"
            for old, new in zip(self.designs, self.designs[1:], strict=False)
            for line in changes(old, new)
        ]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """
    >>> changes({"design": {"seeds": 3, "claims": ["a"]}}, {"design": {"seeds": 5, "claims": ["a"]}})
    ['seeds was 3 and is 5']
    """
    before, after = flatten(dict(old["design"])), flatten(dict(new["design"]))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{key} was {json.dumps(before.get(key))} and is {json.dumps(after.get(key))}" for key in sorted(keys)]
