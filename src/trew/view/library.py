"""The runs that a server shows: those that were named, and those in folders that were named."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ..errors import DataError
from ..runs.layout import LOCK, STUDY_LOCK
from .answers import NotHere
from .viewed import ViewedRun

_DEEPEST = 3
_OF_A_STUDY = 6
_MOST = 2000
"""Folders of runs are searched to this depth, a study's below it to another, and no more runs than this are shown of
each folder that was named."""
_INSIDE = frozenset({"rollouts", "evals", "checkpoints", "final", "weights", "pending"})
"""Members of a run folder that hold no other runs."""


class Library:
    """Finds runs again at every listing, so that a run that begins later appears by itself.

    An id is the folder's name, made safe for URLs; where several have the same, with a hash of the whole path, so that
    an address leads to the same run after a restart. It stays the run's for as long as the server runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.abspath(folder)) for folder in folders]
        # By folder, and by id. Runs are never removed, so that an id stays the run's.
        self._runs: dict[Path, ViewedRun] = {}
        self._ids: dict[str, ViewedRun] = {}
        # What the last listing did not show, in words.
        self.left_out: list[str] = []
        self._lock = threading.Lock()
        for folder in folders:
            if not folder.is_dir():
                raise DataError(f"{folder}: no such folder; give a run folder of trew train, or one that contains runs")
        if not self.runs():
            some = ", ".join(map(str, folders))
            raise DataError(
                f"{some}: no run is there; give a run folder of trew train, or a folder that contains runs"
                + _about_links(self._folders)
            )

    def runs(self) -> list[ViewedRun]:
        """All runs that are there now, in the order of the arguments and then by name."""
        with self._lock:
            # One more than are shown, which says that there are more.
            each = {folder: list(islice(_search(folder), _MOST + 1)) for folder in self._folders}
            self.left_out = [
                f"{folder}: has more than {_MOST:,} runs, and only the first {_MOST:,} are shown; start trew view with "
                "the folders below it that you want to see"
                for folder, paths in each.items()
                if len(paths) > _MOST
            ]
            found = _once([path for paths in each.values() for path in paths[:_MOST]])
            known = {*found, *self._runs}
            shared = Counter(_plain(path.name) for path in known)
            for path in found:
                if path not in self._runs:
                    id = self._new_id(path, alone=shared[_plain(path.name)] == 1)
                    run = ViewedRun(path, id=id, name=self._name(path, known))
                    self._runs[path] = self._ids[run.id] = run
            return [self._runs[path] for path in found]

    def run(self, id: str) -> ViewedRun:
        """The run with this id. Raises NotHere if there is none, or if its folder is gone."""
        with self._lock:
            run = self._ids.get(id)
        if run is None:
            # Outside the lock, which runs() takes itself.
            self.runs()  # it may have begun since the last listing
            run = self._ids.get(id)
        if run is None:
            raise NotHere(
                f"run: got {id[:100]!r}, which is not one of the runs of this server; reload the list of runs"
            )
        if not is_run(run.folder):
            raise NotHere(f"{run.name}: the folder of this run is gone, or is no run folder any more")
        return run

    def _name(self, path: Path, others: Collection[Path]) -> str:
        """The path below the folder that was named, or the folder's own name; with more of its folders where another
        run would have the same one."""
        own = self._below(path)
        rivals = [other for other in others if other != path and self._below(other) == own]
        ends = (path.parts[-count:] for count in range(len(own), len(path.parts) + 1))
        return str(Path(*next(end for end in ends if all(other.parts[-len(end) :] != end for other in rivals))))

    def _below(self, path: Path) -> tuple[str, ...]:
        for folder in self._folders:
            if path != folder and path.is_relative_to(folder):
                return path.relative_to(folder).parts
        return path.parts[-1:]

    def _new_id(self, path: Path, *, alone: bool) -> str:
        plain = _plain(path.name)
        if alone and plain not in self._ids:
            return plain
        # Not a number by order: another run that is found first would take it over at the next start.
        sign = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
        number = 1
        while (made := f"{plain}-{sign}" if number == 1 else f"{plain}-{sign}-{number}") in self._ids:
            number += 1
        return made


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"


def is_run(folder: Path) -> bool:
    """Whether a run has written into ``folder``, its configuration at least."""
    there = {name for name in (LOCK, "config.toml", "metrics.jsonl", "rounds.jsonl", "summary.json", "rollouts")
             if os.path.lexists(folder / name)}  # fmt: skip
    # config.toml and metrics.jsonl are common names: one alone is no run.
    return ("config.toml" in there and len(there) > 1) or {"metrics.jsonl", "rollouts"} <= there


def _once(paths: Sequence[Path]) -> list[Path]:
    """Each run folder under one name: that with the fewest links in it, of several the first."""
    names: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # it is gone since it was found
            continue
        known = names.get((found.st_dev, found.st_ino))
        if known is None or _links(path) < _links(known):
            names[found.st_dev, found.st_ino] = path
    # In the order of the paths, which the dictionary lost where a name took another one's place.
    chosen = set(names.values())
    return [path for path in dict.fromkeys(paths) if path in chosen]


def _links(path: Path) -> int:
    return sum(part.is_symlink() for part in (path, *path.parents))


def _about_links(folders: Sequence[Path]) -> str:
    """What to do about links below folders in which no run was found; empty if there are none."""
    count = 0
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            count += sum(entry.is_symlink() for entry in entries)
    if not count:
        return ""
    said = "1 link there leads" if count == 1 else f"{count} links there lead"
    return f". {said} to no run folder, and only links to run folders are followed; give the folders that hold the runs"


def _search(folder: Path, deeper: int = _DEEPEST, *, named: bool = True) -> Iterator[Path]:
    """The run folders at and up to ``deeper`` levels below ``folder``. Follows links right below a folder that was
    ``named``, if they lead to run folders, and no others: these may lead anywhere, and around in circles."""
    inside = _INSIDE if is_run(folder) else frozenset()
    if inside:
        yield folder
        # Rounds of trew iterate lie inside the folder of their run.
        if not os.path.lexists(folder / "rounds.jsonl"):
            return
    if os.path.lexists(folder / STUDY_LOCK):  # runs/task/regime/algorithm/value/seed
        deeper = _OF_A_STUDY
    if not deeper:
        return
    try:
        with os.scandir(folder) as entries:
            # Sorted by name: os.scandir gives entries in no order.
            inner = sorted(e.name for e in entries if _followed(e, named=named and not inside))
    except OSError:
        return
    for name in inner:
        # Only of a run: a folder of runs may have such a name too, as that of the study "weights".
        if name not in inside:
            yield from _search(folder / name, deeper - 1, named=False)


def _followed(entry: os.DirEntry[str], *, named: bool) -> bool:
    if entry.name.startswith("."):
        return False
    return entry.is_dir(follow_symlinks=False) or (named and entry.is_symlink() and is_run(Path(entry.path)))
