"""Resolves a source (file, folder or hub id) to the rows of a split.

A path on disk takes precedence over a hub id of the same name. A folder holds ``train.*``, ``test.*`` and
``validation.*`` as .jsonl, .json or .parquet, possibly in shards such as ``train-00000-of-00002.parquet``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DataError
from . import hub
from .files import SUFFIXES, read_rows, suffix_of
from .rows import Row, Split

_ALIASES = {"train": ("train",), "test": ("test",), "validation": ("validation", "valid", "val", "dev")}
# The word that a name begins with: train, train-00000-of-00002, test.v2.
_SPLIT_FILE = re.compile(r"(?P<word>[a-z]+)(?P<rest>[-_.].*)?", re.DOTALL)
# The datasets package has put a fingerprint behind the numbers: train-00000-of-00002-a09b74b3ef9c3b56.
_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<total>\d{5})(-[0-9a-f]{16})?$")
# Names that look like a split to evaluate on, whether or not trew reads them as one.
_LIKE_EVAL = re.compile(r"(test|validation|valid|val|dev|eval)(?![^\W_])", re.IGNORECASE)
_LIKE_TRAIN = re.compile(r"train(?![^\W_])", re.IGNORECASE)
_NO_ROWS = frozenset({".py", ".ipynb", ".sh", ".md", ".log", ".toml", ".yaml", ".yml"})  # code, notes and settings
EVAL_SPLITS = ("test", "validation")  # in order of preference


def read_train(source: str) -> Split:
    """Reads the training rows of a source: the file, or the train split (or only split) of a folder or hub set."""
    return _read(source, ("train",))


def read_rollouts(source: str) -> Split:
    """Reads completions: a file of them, or all of a run's folder."""
    folder = _path(source) / "rollouts"
    files = sorted(folder.glob("[0-9]*.parquet")) if folder.is_dir() else []
    return _files(source, files) if files else _read(source, ("train",))


def read_eval(source: str) -> Split:
    """Reads the evaluation rows of a source: the file, or the test split, with validation as the fallback."""
    return _read(source, EVAL_SPLITS)


def read_eval_split_of(source: str) -> Split | None:
    """Reads the test (or validation) split that belongs to a training source; None if there is none."""
    path = _path(source)
    # A file named train.* announces a folder of splits: test.* may lie beside it.
    if path.is_dir() or (path.is_file() and _split_of(path) == "train"):
        folder = path if path.is_dir() else path.parent
        return _first_of(folder, EVAL_SPLITS)
    if path.exists() or suffix_of(path) in SUFFIXES:
        return None
    parsed = hub.parse_id(source)
    if parsed is None or parsed.split not in ("", "train"):
        return None  # a named split such as train_sft has no well-known counterpart
    name = next(_among(EVAL_SPLITS, hub.split_names(parsed)), None)
    return hub.read_split(parsed, name) if name else None


def unread_eval_note(source: str) -> str:
    """What beside training rows looks like a test split and is not read, and what is; empty if there is nothing. For a
    source of which :func:`read_eval_split_of` found none."""
    path = _path(source)
    if not path.is_dir() and not (path.is_file() and _LIKE_TRAIN.match(path.name)):
        return ""
    try:
        inside = sorted(p.name + "/" * p.is_dir() for p in (path if path.is_dir() else path.parent).iterdir())
    except OSError:
        return ""
    unread = [name for name in inside if _LIKE_EVAL.match(name) and Path(name).suffix.lower() not in _NO_ROWS]
    if not unread:
        return ""
    shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
    words = ", ".join(word for name in EVAL_SPLITS for word in _ALIASES[name])
    return (
        f"{shown} beside it {'is' if len(unread) == 1 else 'are'} not read: beside train.*, in lower case, trew reads "
        f"files named {words} that end in {', '.join(SUFFIXES)}; rename or convert it, or give data.eval"
    )


def _path(source: str) -> Path:
    return Path(os.path.expanduser(source))


def _among(wanted: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    return (name for name in wanted if name in names)


def _read(source: str, wanted: Sequence[str]) -> Split:
    path = _path(source)
    if path.is_dir():
        split = _first_of(path, wanted)
        if split is None:
            raise DataError(_no_split_message(path, wanted))
        return split
    # What ends like a data file is meant as one, even if it is missing: the error then names the file.
    if path.exists() or suffix_of(path) in SUFFIXES:
        return _files(source, [path])
    parsed = hub.parse_id(source)
    if parsed is None:
        raise DataError(f"{source}: no such file or folder, and not a hub id (owner/name, owner/name:config:split)")
    return hub.read_split(parsed, parsed.split or _split_on_hub(parsed, source, wanted))


def _split_on_hub(parsed: hub.HubId, source: str, wanted: Sequence[str]) -> str:
    """The first of the wanted splits, or the only split there is. Raises DataError if neither exists."""
    names = hub.split_names(parsed)
    found = [*_among(wanted, names)] or (names if len(names) == 1 else [])
    if not found:
        raise DataError(f"{source}: has no {' or '.join(wanted)} split, only {', '.join(names)}; "
                        f"name one: {parsed.path}:{parsed.config}:{names[0]}")  # fmt: skip
    return found[0]


def _first_of(folder: Path, wanted: Sequence[str]) -> Split | None:
    for name in wanted:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and _split_of(path) == name]
        if files:
            _check_shards(folder, name, files)
            return _files(str(folder), files)
    return None


def _split_of(path: Path) -> str | None:
    """The split that a file's name announces."""
    match = _SPLIT_FILE.fullmatch(_stem(path))
    if suffix_of(path) not in SUFFIXES or match is None:
        return None
    return next((name for name, words in _ALIASES.items() if match["word"] in words), None)


def _stem(path: Path) -> str:
    """The file's name without all its suffixes: ``train`` for ``train.jsonl.gz``."""
    return path.name.removesuffix(suffix_of(path))


def _check_shards(folder: Path, name: str, files: Sequence[Path]) -> None:
    """Raises DataError unless several files are the complete, numbered shards of one split."""
    shards = [shard for path in files if (shard := _SHARD.search(_stem(path)))]
    # A single file without a shard's number is the whole split.
    if len(files) == 1 and not shards:
        return
    if len(shards) < len(files) or len(set(map(suffix_of, files))) > 1:
        names = ", ".join(path.name for path in files)
        raise DataError(f"{folder}: several files could be the {name} split ({names}); give one file as the source")
    numbers = sorted(int(shard["number"]) for shard in shards)
    totals = {int(shard["total"]) for shard in shards}
    # Different totals are shards of two versions of the set, whose rows may overlap.
    if len(totals) > 1 or numbers != list(range(max(totals))):
        raise DataError(
            f"{folder}: the {name} split is incomplete: {len(files)} of {max(totals)} files are here; "
            "download the others"
        )


def _files(source: str, paths: Sequence[Path]) -> Split:
    rows: list[Row] = []
    for path in paths:
        rows += read_rows(path)
    label = str(paths[0]) if len(paths) == 1 else source
    # Without the number of a shard: uids count the rows through all of them.
    return Split(label, _SHARD.sub("", _stem(paths[0])), rows)


def _no_split_message(folder: Path, wanted: Sequence[str]) -> str:
    inside = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    shown = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "") if inside else "nothing"
    expected = " or ".join(f"{name}.jsonl, {name}.json, {name}.parquet" for name in wanted)
    return f"{folder}: expected {expected} in this folder, found {shown}; or give one file as the source"
