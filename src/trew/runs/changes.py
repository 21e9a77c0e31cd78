"""What changed where a run was continued: changes.jsonl in its folder, which most runs do not have.

config.toml holds the settings of a run's last steps. Without this file, a run that went on under other ones
(``--allow-changes``) would look as if all of its steps had been made under them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.stored import completed
from ..errors import ResumeError
from ..utils.toml import flatten

FILE = "changes.jsonl"
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class RunChange:
    """A place at which a run went on otherwise than it began."""

    step: int  # the last step before it
    config: str  # the settings until there, as config.toml had them
    settings: tuple[str, ...] = ()  # a line for each that changed: "learner.lr was 1e-05, is 2e-05"
    others: tuple[str, ...] = ()  # the same for data, the user's files and models
    versions: tuple[str, ...] = ()  # the same for libraries, which may round otherwise

    @property
    def is_other_run(self) -> bool:
        """Whether more changed than versions of libraries."""
        return bool(self.settings or self.others) or any(text.startswith("trew ") for text in self.versions)

    @property
    def what(self) -> str:
        """Everything that changed."""
        return "; ".join((*self.settings, *self.others, *self.versions))

    def told(self, unit: str = "step") -> str:
        """A sentence for people; ``unit``: what a row of the run is of. Parts of a round are done before its row."""
        at = f"After step {self.step}" if unit == "step" else f"In or before {unit} {self.step + 1}"
        return f"{at} the run went on with changes: {self.what}. config.toml has the settings of its last {unit}s."


@dataclass(frozen=True, slots=True)
class Accepted:
    """What is not as it was when a checkpoint was written, besides settings: a text for each."""

    others: tuple[str, ...] = ()  # of data, the user's files and models
    versions: tuple[str, ...] = ()  # of libraries, which may round otherwise


NOTHING = Accepted()


def read(text: str) -> list[RunChange]:
    """The changes that a file's text holds, in order; leaves out lines that are none."""
    return sorted(filter(None, map(_decoded, text.splitlines())), key=lambda change: change.step)


def in_folder(folder: Path) -> list[RunChange]:
    """The changes of a run's folder. Raises ResumeError for a damaged file: what it said would be lost."""
    path = folder / FILE
    if not path.is_file():
        return []
    text = path.read_text("utf-8", errors="replace")
    found = read(text)
    if len(found) < len(text.splitlines()):
        raise ResumeError(
            f"{path}: is damaged, so that it is not known which steps were made under which settings; put a backup of "
            "it there, or remove it to take all for steps of the settings in config.toml"
        )
    return found


def notes_on(source: str) -> list[str]:
    """Notes for those who read the rollouts in a run's folder: where it went on as another run, so that the scores
    before and after may be of different rewards."""
    return [
        f"{source}: {change.told()} Its scores before and after that may be of different rewards."
        for change in in_folder(Path(os.path.expanduser(source)))
        if change.is_other_run
    ]


def write(changes: Sequence[RunChange]) -> str:
    """The text of the file."""
    return "".join(json.dumps(dataclasses.asdict(change)) + "\n" for change in changes)


def add(
    changes: Sequence[RunChange],
    step: int,
    *,
    before: str,
    now: str,
    free: Sequence[str],
    accepted: Accepted = NOTHING,
) -> list[RunChange]:
    """The changes of a run that goes on after ``step`` with the settings ``now`` (TOML) instead of ``before``; those of
    keys that begin with one of ``free`` do not count.

    What changed after a later step changes there now: the steps between are made anew. ``accepted`` is known
    from the checkpoint of ``step`` itself.
    """
    kept = [change for change in changes if change.step < step]
    again = [change for change in changes if change.step >= step]
    config = again[0].config if again else before
    found = RunChange(
        step,
        config,
        settings=tuple(_differences(config, now, free)),
        others=accepted.others,
        versions=accepted.versions,
    )
    return [*kept, found] if found.settings or found.others or found.versions else kept


def settings_at(changes: Sequence[RunChange], step: int, *, now: str) -> str:
    """The settings (TOML) that the weights of ``step`` were trained under last; ``now``: those of the run's end."""
    return next((change.config for change in changes if change.step >= step), now)


def _differences(before: str, now: str, free: Sequence[str]) -> list[str]:
    """A line for each setting that differs and is not free; one that an earlier version did not have is at its
    default."""
    old, new = (flatten(tomllib.loads(text)) for text in (before, now))
    known = old.keys() | new.keys()
    old, new = ({key: value for key, value in completed(table).items() if key in known} for table in (old, new))
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not key.startswith(tuple(free))]
    return [f"{key} was {_shown(old.get(key))}, is {_shown(new.get(key))}" for key in keys]


def _shown(value: Any) -> str:
    """
    >>> _shown(1e-05), _shown(None), _shown("x" * 99)[-3:]
    ('1e-05', 'not set', 'xx…')
    """
    text = "not set" if value is None else str(value) if str(value) else "''"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _decoded(line: str) -> RunChange | None:
    try:
        row = json.loads(line)
        texts = [tuple(row[name]) for name in ("settings", "others", "versions")]
        change = RunChange(row["step"], row["config"], *texts)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    plain = isinstance(change.step, int) and all(
        isinstance(text, str) for text in (change.config, *change.settings, *change.others, *change.versions)
    )
    return change if plain and not isinstance(change.step, bool) else None
