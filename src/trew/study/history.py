"""What was fixed before the first run, and what was changed after it: kept beside the runs, shown with the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..utils.toml import flatten
from .design import Study
from .states import write_json

_FILE = "history.json"
_COUNTS = ("made", "there")  # beside the last design


@dataclass(frozen=True, slots=True)
class History:
    """Every design that runs were made under, in order: its digest, its content, and how many runs there were then.

    ``made`` is how many runs have ever ended, ``there`` how many the folder had when it was last looked at: runs that
    are deleted later were seen all the same.
    """

    folder: Path
    designs: tuple[Mapping[str, Any], ...] = ()
    made: int = 0
    there: int = 0

    @staticmethod
    def read(folder: Path) -> History:
        try:
            found = json.loads((folder / _FILE).read_bytes())
        except (OSError, ValueError):
            found = []
        designs = tuple({key: value for key, value in of.items() if key not in _COUNTS} for of in found)
        counts = found[-1] if found else {}
        # A file without counts is an older trew's, or of another folder: what came since its last change is counted as
        # soon as the folder is looked at.
        made = counts.get("made", counts.get("runs_before", 0))
        return History(folder, designs, made, counts.get("there", made))

    def note(self, study: Study, *, runs: int) -> list[str]:
        """Records the design if it is new; returns a line for each change since the last one that had runs. ``runs``
        are in the folder now."""
        # More than there were: those that ended just before the study was killed.
        now = replace(self, made=self.made + max(runs - self.there, 0), there=runs)
        if now.designs and now.designs[-1]["digest"] == study.digest:
            now._write()
            return []
        own = {"digest": study.digest, "runs_before": now.made, "design": study.to_json()}
        # A design that no run was made under is no history: replaced as long as nothing has been seen.
        kept = [design for number, design in enumerate(now.designs) if now._had_runs(number)]
        replace(now, designs=(*kept, own))._write()
        return [f"changed after {now.made} runs: {line}" for line in changes(kept[-1], own)] if kept else []

    def count(self) -> None:
        """Counts a run that has just ended."""
        # Without a design somebody has removed the file: the next call begins another.
        if self.designs:
            replace(self, made=self.made + 1, there=self.there + 1)._write()

    def _write(self) -> None:
        *earlier, last = self.designs
        write_json(self.folder / _FILE, [*earlier, {**last, "made": self.made, "there": self.there}])

    @staticmethod
    def begin(folder: Path, study: Study, designs: Sequence[Mapping[str, Any]], *, runs: int = 0) -> None:
        """Begins a folder's history with that of a part that goes on there, which had so many ``runs``. A study whose
        design never changed has no designs but its own. Where the folder has a history, designs that it does not know
        are put before its own: nobody knows when they were left."""
        theirs = [*designs] or [{"digest": study.digest, "runs_before": 0, "design": study.to_json()}]
        known = History.read(folder)
        if not known.designs:
            write_json(folder / _FILE, theirs)
            return
        own = {of["digest"] for of in known.designs}
        ends = [*(of["runs_before"] for of in theirs[1:]), runs]
        before: list[Mapping[str, Any]] = []
        seen = 0
        for of, end in zip(theirs, ends, strict=True):
            if of["digest"] not in own and end > of["runs_before"]:
                before.append({**of, "runs_before": seen})
                seen += end - of["runs_before"]
        later = [{**of, "runs_before": of["runs_before"] + seen} for of in known.designs]
        if before:
            replace(known, designs=(*before, *later), made=known.made + seen, there=known.there + seen)._write()

    def _had_runs(self, number: int) -> bool:
        after = self.designs[number + 1]["runs_before"] if number + 1 < len(self.designs) else self.made
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
    >>> changes({"design": {"set": {}}}, {"design": {"set": {"steps": 3}}})
    ['set.steps was not set and is 3']
    """
    before, after = flatten(dict(old["design"])), flatten(dict(new["design"]))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    was, now = ({key: json.dumps(side[key]) if key in side else "not set" for key in keys} for side in (before, after))
    return [f"{key} was {was[key]} and is {now[key]}" for key in sorted(keys)]
