"""Continues a study from results alone: runs of a part that was made elsewhere count as done.

The folder of a study has all runs and can be stopped and continued at will, but it stays where it is. results.json
travels: it has every row with the design that it was made under. A row is taken only if the settings of its run,
made anew from that design, are those that this study would give it, and if it started from the same weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.recipe import apply_overrides, parse
from ..errors import ConfigError
from ..runs.files import write_atomic
from .design import Run, Study
from .results import rows_of
from .rows import Row
from .states import fingerprint

_FOLDER = "earlier"


@dataclass(frozen=True, slots=True)
class Earlier:
    """The results of one part: its design, the weights that its runs started from, and its rows."""

    source: Path
    study: Study
    designs: Sequence[Mapping[str, Any]]  # all that its runs were made under; empty if it never changed
    weights: Mapping[str, str]  # of each task's model, as hashes; empty if the study makes none
    rows: Mapping[Run, Row]

    @staticmethod
    def read(path: Path) -> Earlier:
        """Raises ConfigError if ``path`` has no results of a study."""
        try:
            found = json.loads(path.read_bytes())
            rows = [row for kind in ("tuning", "runs") for row in rows_of(found, kind)]
            weights = {task: str(about.get("sha256", "")) for task, about in found["models"].items()}
            study = Study.from_json(found["design"])
            return Earlier(path, study, found.get("history", ()), weights, {row.run: row for row in rows})
        except OSError as error:
            raise ConfigError(f"--earlier: {path}: cannot be read: {error.strerror}; give a results.json") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--earlier: {path}: has no results of trew study ({type(error).__name__}: {error}); give the "
                "results.json of a study's folder"
            ) from None

    def settings(self, run: Run, base: Path) -> str:
        """The settings of a run of this part, as ``states.fingerprint`` gives them; empty if this trew refuses them.
        Files that a recipe names are relative to ``base``."""
        # apply_overrides() changes the table.
        table = copy.deepcopy(dict(self.study.recipe))
        try:
            apply_overrides(table, self.study.overrides(run))
            config = parse(table, base=base)
        except (ConfigError, KeyError):
            return ""
        return fingerprint(config, model=self.weights.get(run.cell.task, ""))


def keep(part: Earlier, out: Path) -> None:
    """Copies results into the study's folder, by their content: the next call needs no file."""
    content = part.source.read_bytes()
    place = out / _FOLDER / f"{hashlib.sha256(content).hexdigest()[:16]}.json"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, lambda file: file.write(content))


def kept(out: Path) -> list[Earlier]:
    """All that ``keep`` has put there."""
    return [Earlier.read(path) for path in sorted((out / _FOLDER).glob("*.json"))]


def foreign_weights(parts: Sequence[Earlier], models: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A problem for each part whose runs started from other weights than this study's."""
    for part in parts:
        for task, model in models.items():
            theirs, own = part.weights.get(task, ""), str(model.get("sha256", ""))
            if theirs and own and theirs != own:
                yield (
                    f"--earlier: {part.source}: its model for {task} has other weights ({theirs[:12]}, here "
                    f"{own[:12]}), as another torch or other settings make them: "
                    f"copy models/{task} and models/{task}.json from the folder of that study, or leave the file out"
                )
