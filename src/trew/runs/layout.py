"""What a kind of run writes into its folder, and whether a folder can be used for one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..utils.toml import is_text

LOCK = "run.lock"
STUDY_LOCK = "study.lock"
"""In the folder of a study, whose runs lie below it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The members of a kind of run's folder besides its lock; names may be patterns (``round-*``)."""

    rows: str  # the file with one row per step or round
    files: tuple[str, ...]  # besides config.toml, summary.json and report.html
    folders: tuple[str, ...]
    foreign: tuple[str, ...] = ()  # what trackers write there
    made: tuple[str, ...] = ()  # folders that exist from the beginning
    unit: str = "step"  # what a row is of
    parts: str = ""  # pattern of folders whose results count before they have a row

    def owns(self, name: str) -> bool:
        """Whether a member of that name is the run's, so that ``overwrite`` removes it."""
        every = ("config.toml", "summary.json", "report.html", self.rows, *self.files, *self.folders, *self.foreign)
        return any(fnmatchcase(name, pattern) for pattern in every)


RUN = Layout(
    rows="metrics.jsonl",
    files=("changes.jsonl", "events.log", "failed_reward.json", "ledger.jsonl", "memory.json", "teacher.json"),
    folders=("rollouts", "evals", "checkpoints", "final", "bad_steps", "servers", "ranks", "weights", "pending"),
    foreign=("wandb", "tensorboard", "mlflow.db"), made=("rollouts", "evals", "checkpoints"),
)  # fmt: skip
"""One training, of a policy or of a reward model."""


def problems(
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    layout: Layout = RUN,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns everything that would keep a run from using ``folder``, one line each; touches nothing. ``settings``:
    those of the run, as nested plain values: nothing that they name may be overwritten."""
    found = []
    if resume and overwrite:
        found.append("out: resume (--resume) continues a run and overwrite (--overwrite) deletes it; give one of them")
    if "\0" in os.fspath(folder):
        return [*found, f"out: got {os.fspath(folder)!r}, which contains a NUL character; choose another name"]
    if not is_text(os.fspath(folder)):
        return [*found, f"out: got {os.fspath(folder)!r}, which is not UTF-8 text; choose another name"]
    if not os.fspath(folder):
        return [*found, "out: got '', accepts the folder that the run writes to, for example 'runs/first'"]
    # Nobody means a folder called ~ in the working directory, and whoever removes it may remove more.
    if (home := os.path.expanduser(folder)) != os.fspath(folder):
        return [*found, f"out: got {os.fspath(folder)!r}, in which ~ is not expanded; write {home!r}"]
    folder = Path(folder)
    if folder.is_symlink() and not folder.exists():
        there = folder.resolve()
        return [
            *found,
            f"out: {folder} is a link to {there}, which does not exist; create it, or choose another folder",
        ]
    if not folder.exists():
        return found + _parent_problems(folder)
    if not folder.is_dir():
        return [*found, f"out: {folder} is a file, not a folder; choose another folder for the run"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [*found, f"out: {folder} is not writable; change its permissions or choose another folder"]
    found += _content_problems(folder, layout, resume=resume, overwrite=overwrite)
    return [*found, *_read_problems(folder, layout, settings or {})] if overwrite else found


def _content_problems(folder: Path, layout: Layout, *, resume: bool, overwrite: bool) -> list[str]:
    """Says what in an existing folder keeps a run from writing there: links, another run, foreign files."""
    names = {p.name for p in folder.iterdir()}
    found = [] if overwrite else _link_problems(folder, names, layout)  # overwriting removes links
    if not has_run(folder, layout):
        return found + _foreign_problems(folder, names, layout)
    if resume or overwrite:
        return found
    state = "a finished run" if "summary.json" in names else "a run"
    return [
        *found,
        f"out: {folder} already holds {state}; --resume continues it, --overwrite deletes it and starts over, "
        "or choose another folder",
    ]


_READ = frozenset({
    "model", "reward_model", "tokenizer", "chat_template", "train", "eval", "pairs", "preset", "runs", "name", "tools",
})  # fmt: skip
"""Last words of the settings that name files or folders which a run reads; ``FILE.py:NAME`` of functions and classes,
after ``trl:`` too."""


def _read_problems(folder: Path, layout: Layout, settings: Mapping[str, Any]) -> Iterator[str]:
    """Says what the run reads of the one that it is to overwrite: a final model to go on from, or its rollouts."""
    own = folder.resolve()
    for name, value in _paths(settings):
        there = _file_of(value).resolve()
        if there == own or (own in there.parents and layout.owns(there.relative_to(own).parts[0])):
            yield (
                f"{name}: {value} belongs to the run in {folder}, which --overwrite deletes first; choose another "
                "folder for the new run (--out), or move it out of there"
            )


def _paths(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The settings that name something which exists, by dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _paths(inner, name)
    # lexists: no error for what cannot be a path, such as a name that is too long.
    elif isinstance(value, str) and name.rpartition(".")[2] in _READ and os.path.lexists(_file_of(value)):
        yield name, value


def _file_of(value: str) -> Path:
    """The file or folder that a setting names."""
    file, colon, _ = value.removeprefix("trl:").rpartition(":")
    return Path(os.path.expanduser(file if colon and file.endswith(".py") else value))


def _link_problems(folder: Path, names: set[str], layout: Layout) -> list[str]:
    """Says which of the run's own names is a link, through which a run would write into another folder."""
    links = sorted(name for name in names if layout.owns(name) and (folder / name).is_symlink())
    if not links:
        return []
    return [
        f"out: {folder / links[0]} is a link, and a run writes only into its own folder; remove the link, or give "
        "the folder that it points to"
    ]


def _foreign_problems(folder: Path, names: set[str], layout: Layout) -> list[str]:
    """Refuses a folder with files of other origin: it was probably named by mistake."""
    if not names or _left_by_trew(names, layout):
        return []
    some = f"{', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}"
    return [f"out: {folder} is not empty and not a run folder (it holds {some}); choose a new or an empty folder"]


def _left_by_trew(names: set[str], layout: Layout) -> bool:
    """Whether a run that ended before its first result left these names: its lock and its own files, nothing else."""
    return LOCK in names and all(name == LOCK or layout.owns(name) for name in names)


def _parent_problems(folder: Path) -> list[str]:
    """Checks that a missing folder can be created. Its parent may be missing too, but no more than that: a longer
    missing path is a typo or an unmounted disk.
    """
    anchor = folder.absolute().parent
    if not anchor.exists():
        anchor = anchor.parent
    if not anchor.exists():
        return [f"out: {folder}: the folder {anchor} does not exist; create it (mkdir -p {anchor}) or choose another"]
    if not anchor.is_dir():
        return [f"out: {folder}: {anchor} is a file, not a folder; choose another folder for the run"]
    if not os.access(anchor, os.W_OK | os.X_OK):
        return [f"out: {folder} cannot be created: {anchor} is not writable; choose another folder for the run"]
    return []


def has_run(folder: Path, layout: Layout = RUN) -> bool:
    """Whether ``folder`` holds results of a run. A run that ended before its first result (a model that could not be
    loaded) leaves nothing to protect, and files of the same names that trew did not write are not a run.
    """
    rows = folder / layout.rows
    # metrics.jsonl alone is a common name; next to our lock or our configuration it belongs to a run.
    ours = (folder / LOCK).exists() or ((folder / "config.toml").exists() and rows.exists())
    results = rows.exists() or (folder / "summary.json").exists()
    # A folder that is made at the beginning (``made``) counts only once something is in it.
    return ours and (results or any(any(path.glob("*")) for name in layout.folders for path in folder.glob(name)))
