"""One run as the server sees it: its state, its configuration, its metrics; read again where its folder changed."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.free import is_free
from ..diagnostics.health import finite
from ..runs import changes
from ..runs.layout import LOCK
from ..runs.lock import held
from ..runs.report import safe_files
from ..runs.report.read import given_by_data
from ..utils.toml import flatten
from ..utils.user_files import short_name
from .curves import Curves, MetricsFile
from .lock_copy import is_copy
from .signature import Signature, signature

_FILES = (
    "config.toml", "metrics.jsonl", "rounds.jsonl", "summary.json", "memory.json", "events.log", changes.FILE, LOCK,
)  # fmt: skip
_FOLDERS = ("rollouts", "evals", "checkpoints", "bad_steps", "servers", "final")
_LOADS: Mapping[str, Any] = {
    "config.toml": tomllib.loads, "summary.json": json.loads, "memory.json": json.loads, "events.log": str,
    changes.FILE: str,
}  # fmt: skip
"""Texts of a run, and what reads each."""
_ELSEWHERE_S = 3600
"""A run whose process is on another host counts as running if its folder changed within this time."""

Values = Mapping[str, Any]


class ViewedRun:
    """Everything is read when it is asked for, and kept until the folder changes. For several threads."""

    def __init__(self, folder: Path, *, id: str, name: str) -> None:
        self.folder, self.id, self.name = folder, id, name
        # Reentrant: methods that take it call each other.
        self.lock = threading.RLock()
        self._read: dict[str, tuple[object, Any]] = {}
        self._metrics: MetricsFile | None = None

    # ---- what changed

    def signatures(self) -> dict[str, Signature | None]:
        """Of every member that is shown: inode, size and time of the last change; None where it is missing.

        A folder's time changes when a file is renamed into it or removed, which is how a run writes.
        """
        return {name: signature(self.folder / name) for name in (*_FILES, *_FOLDERS)}

    @property
    def revision(self) -> str:
        # A run that is killed changes no file: only whether it runs.
        known = (self.signatures(), self.is_running)
        return hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def kept(self, name: str, key: object, make: Any) -> Any:
        """The result of ``make``, made again only if ``key`` is another one than last time."""
        with self.lock:
            if name not in self._read or self._read[name][0] != key:
                self._read[name] = (key, make())
            return self._read[name][1]

    # ---- files

    def text(self, name: str) -> str:
        """A text file of the folder; empty if it is missing or must not be read."""
        return self.kept(f"text {name}", signature(self.folder / name), lambda: _text(self.folder, name))

    @property
    def config(self) -> Mapping[str, Any]:
        """config.toml as nested tables; empty if it cannot be read."""
        text = self.text("config.toml")
        return self.kept("config", text, lambda: _parsed(text, tomllib.loads))

    @property
    def values(self) -> Values:
        """The settings, flat: {"learner.lr": 1e-6, ...}"""
        return self.kept("values", self.text("config.toml"), lambda: flatten(dict(self.config)) if self.config else {})

    @property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty while the run is not finished."""
        text = self.text("summary.json")
        return self.kept("summary", text, lambda: _parsed(text, json.loads))

    def curves(self) -> Curves:
        """The metrics so far. Hold :attr:`lock` while using them: they grow."""
        with self.lock:
            name = "rounds.jsonl" if self.kind == "rounds" else "metrics.jsonl"
            if self._metrics is None or self._metrics.name != name:
                # From the time on, so that a page that is still open from before a restart of the server does not take
                # the rows of an overwritten run for the next ones of those that it has.
                begun = time.time_ns() // 10**6 if self._metrics is None else self._metrics.begun
                self._metrics = MetricsFile(self.folder, name, begun=begun)
            return self._metrics.read(self.config)

    @property
    def problem(self) -> str:
        """What could not be read of the metrics, and why; empty if everything could."""
        file = self._metrics
        if file is None:
            return ""
        bad = file.curves.bad_lines if file.curves is not None else 0
        left_out = f"{file.name}: left out {bad} lines that are not metrics rows" if bad else ""
        return file.problem or left_out

    @property
    def problems(self) -> list[str]:
        """What could not be read of the folder, and why: it is shown as if it was not there."""
        found = [self.problem]
        for name in _LOADS:
            key = signature(self.folder / name)
            found.append(self.kept(f"problem {name}", key, lambda name=name: _unread(self.folder, name)))
        return [text for text in found if text]

    def names(self, folder: str) -> list[str]:
        """The names in a folder of the run; none if it cannot be read."""

        def read() -> list[str]:
            try:
                return safe_files.file_names(self.folder, folder)
            except OSError:
                return []

        return self.kept(f"names {folder}", signature(self.folder / folder), read)

    def steps_of(self, folder: str) -> list[int]:
        """The numbers of the members of ``folder`` that belong to one step, in order."""
        stems = (name.partition(".")[0] for name in self.names(folder) if not name.startswith("."))
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 16)

    def table_signature(self, kind: str, step: int) -> Signature | None:
        """Of the table of a step in ``rollouts`` or ``evals``."""
        return signature(self.folder / kind / f"{step:06d}.parquet")

    # ---- about it

    @property
    def kind(self) -> str:
        if "iterate" in self.config or os.path.lexists(self.folder / "rounds.jsonl"):
            return "rounds"
        return "reward" if self.config and "objective" not in self.config else "policy"

    @property
    def given(self) -> str:
        """What the data gave in place of completions, so that no reward judged them: ``demonstrations`` or ``pairs``;
        empty where they were sampled."""
        return given_by_data(self.config)

    @property
    def is_running(self) -> bool:
        try:
            with safe_files.open_file(self.folder, LOCK, most=safe_files.MIB) as file:
                content, opened = file.read(4096), os.fstat(file.fileno())
        except OSError:
            return False
        found = held(content)
        if found and is_copy(self.folder / LOCK, content, opened):
            return False
        # None: the process is on another host, where nobody can ask for it.
        return time.time() - self.updated < _ELSEWHERE_S if found is None else found

    @property
    def state(self) -> str:
        if self.is_running:
            return "running"
        return "finished" if self.summary else "stopped"

    @property
    def updated(self) -> float:
        """When the folder last changed, in seconds since 1970."""
        times = [found[2] for name, found in self.signatures().items() if found is not None and name != LOCK]
        return max(times, default=0) / 1e9

    @property
    def setting(self) -> str:
        """Identifies the settings that decide what is learned, apart from the seed."""
        decisive = {k: v for k, v in self.values.items() if k != "seed" and not is_free(k)}
        # A run that went on under other settings has none of its own kind.
        known = (sorted(decisive.items()), self.text(changes.FILE))
        return hashlib.blake2b(repr(known).encode(), digest_size=6).hexdigest()

    def about(self) -> dict[str, Any]:
        """The run in the list of runs."""
        with self.lock:
            curves, values = self.curves(), self.values
            has_rollouts = bool(self.steps_of("rollouts"))
            steps = finite(values.get("iterate.rounds") if self.kind == "rounds" else values.get("steps"))
            return {
                "id": self.id, "name": self.name, "path": str(self.folder), "kind": self.kind, "given": self.given,
                "state": self.state,
                "step": max(curves.steps, default=max(curves.evals, default=0)),
                "steps": whole(steps), "updated": self.updated,
                "model": _word(values.get("model")), "preset": short_name(_word(values.get("objective.preset"))),
                "seed": whole(finite(values.get("seed"))), "setting": self.setting, "revision": self.revision,
                "read": curves.number,
                "warnings": len(curves.health.found), "has_rollouts": has_rollouts,
                "has_tokens": has_rollouts or bool(self.steps_of("evals")),
            }  # fmt: skip


def _text(folder: Path, name: str) -> str:
    try:
        return safe_files.read_text(folder, name)
    except OSError:
        return ""


def _unread(folder: Path, name: str) -> str:
    """Why a file of the folder cannot be read; empty if it can, or if it is missing."""
    try:
        text = safe_files.read_text(folder, name)
        if text.strip():
            _LOADS[name](text)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{name}: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{name}: cannot be read: {error}"
    return ""


def _parsed(text: str, loads: Any) -> Mapping[str, Any]:
    try:
        found = loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def whole(number: float | None) -> float | int | None:
    """
    >>> whole(3.0), whole(0.5), whole(None)
    (3, 0.5, None)
    """
    return int(number) if number is not None and number.is_integer() else number
