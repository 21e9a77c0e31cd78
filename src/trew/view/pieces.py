"""The text of each token, by the tokenizer of the run."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..models.default import DEFAULT_MODEL, cached
from ..runs.report import safe_files
from ..runs.report.token_texts import loaded
from .viewed import ViewedRun

_FILE = "tokenizer.json"
_MOST = 256 * safe_files.MIB
_KEPT = 4


class Tokenizers:
    """The tokenizers that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Any] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: ViewedRun) -> Any:
        """The tokenizer of a run; None if it is nowhere on this machine. Nothing is downloaded."""
        # Held while loading, so that two requests do not load the same one.
        with self._lock:
            for key, text in _candidates(run):
                if key not in self._known:
                    self._known[key] = loaded(text)
                    if len(self._known) > _KEPT:
                        self._known.popitem(last=False)
                if (found := self._known[key]) is not None:
                    return found
        return None


def _candidates(run: ViewedRun) -> Any:
    """Where the tokenizer may be, each with a function that reads it: the exported model of the run, then its model."""
    inside = f"final/{_FILE}"
    if safe_files.exists(run.folder, inside):
        # A file that has changed has another key.
        key = (str(run.folder / inside), _changed(run.folder / inside))
        yield key, lambda: safe_files.read_text(run.folder, inside, most=_MOST)
    for name in (run.values.get("tokenizer"), run.values.get("model")):
        for path in _paths(name, run.folder) if isinstance(name, str) and name else ():
            if path.is_file():
                # Bound now: a generator's variables have moved on when the function is called.
                yield (str(path), _changed(path)), lambda path=path: _read(path)


def _paths(name: str, folder: Path) -> list[Path]:
    """The tokenizer's file of a model: a folder, the default model, or a model of the hub that is on this machine.

    A recipe's relative folder is below the folder in which the run was started, which is this one, as far as is known.
    """
    if name == DEFAULT_MODEL:
        found = cached()
        return [] if found is None else [found / _FILE]
    if "\0" in name:
        return []
    path = Path(os.path.expanduser(name)) / _FILE
    if path.is_absolute() or path.is_file():
        return [path]
    beside = [parent / path for parent in (folder.parent, folder.parent.parent)]
    return [*beside, *_in_cache(name)]


def _in_cache(name: str) -> list[Path]:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, _FILE)
    except Exception:  # a name that is none of the hub's
        return []
    return [Path(found)] if isinstance(found, str) else []


def _read(path: Path) -> str:
    # Links are followed: the hub's cache is made of them, and a user named the model.
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST:
            raise OSError(f"{path}: is not a tokenizer")
        return file.read().decode("utf-8", "replace")


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
