"""Decides whether rounds may go on in a folder that holds some, and records under which settings they do."""

from __future__ import annotations

import json
from pathlib import Path

from ..config.free import FREE
from ..errors import ConfigError
from ..runs import Layout, RunFolder
from ..runs.changes import Accepted
from ..training.changes import check_changes
from ..utils.console import Display
from . import same_data
from .settings import Recipe, dumps

LAYOUT = Layout(
    rows="rounds.jsonl",
    files=("changes.jsonl", "events.log", same_data.FILE),
    folders=("round-*",),
    unit="round",
    parts="round-*",
)
"""The folder of all rounds."""
FREE_IN_ROUNDS = (*FREE, "iterate.rounds", "iterate.learner.microbatch_tokens")
"""Settings that may change between resumes. A round's number of steps is not among them, because it determines where
the prompts of later rounds begin in the data."""


def go_on(folder: RunFolder, recipe: Recipe, fingerprint: str, *, allow: bool, display: Display) -> list[str]:
    """Begins or continues the rounds of a folder: shows what changed, and writes config.toml. Returns a sentence for
    each place at which they went on with changes. Raises ConfigError for changes that are not allowed; ``fingerprint``
    is that of the data."""
    # Before config.toml is replaced: a refused resume leaves the run's settings as they were.
    changed = []
    if folder.resumed:
        _refuse_fewer(folder.folder, recipe.rounds.rounds)
        changed = check_changes(folder.folder, dumps(recipe), free=FREE_IN_ROUNDS, allow=allow)
    other_data = same_data.check(folder, fingerprint, allow=allow)
    for change in (*changed, *other_data):
        display.line(f"note: {change}")
    done = _last_round(folder.folder)
    if done < recipe.rounds.rounds:
        # The summary of a call for fewer rounds marks the folder as finished, however this one ends.
        folder.go_on()
    changes = folder.go_on_with(dumps(recipe), done, free=FREE_IN_ROUNDS, accepted=Accepted(tuple(other_data)))
    return [change.told(LAYOUT.unit) for change in changes]


def _last_round(folder: Path) -> int:
    """The last round that is complete; -1 if none is."""
    rows = folder / LAYOUT.rows
    return json.loads(rows.read_text("utf-8").splitlines()[-1])["round"] if rows.is_file() else -1


def _refuse_fewer(folder: Path, rounds: int) -> None:
    """Raises ConfigError if more rounds have begun: table, page and summary would leave them out."""
    numbers = [path.name.removeprefix("round-") for path in folder.glob("round-*")]
    begun = max((int(number) for number in numbers if number.isdecimal()), default=0)
    if begun > rounds:
        raise ConfigError(
            f"iterate.rounds: got {rounds}, but {folder} has begun round {begun}; give that many or more, as --set "
            f"iterate.rounds={begun} did"
        )
