"""What a run's folder held when a checkpoint was made: how many rows, and which files, each with its hash.

A run that continues adds to what is there. Where rows or completions before the checkpoint are gone, twice, cut off or
changed, its report would be wrong without a word; so all of it is compared before anything is written.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..utils.shapes import Count
from .rows import decode_row

KINDS = {"rollouts": ".parquet", "evals": ".parquet", "bad_steps": ".json"}
"""Folders with one file per step, and how those end."""

_SHOWN = 5  # missing files or steps, before the rest is a number


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of metrics.jsonl: their number, and size and SHA-256 of these lines."""

    count: Count
    size: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """Rows and files up to a checkpoint; ``files`` has "size sha256" by the path in the run's folder."""

    rows: Rows
    files: dict[str, str]


class Ledger:
    """Makes records of a run's folder; a file is read once, and again only after :meth:`forget`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[str, str] = {}

    def forget(self, path: Path) -> None:
        """The file is about to be written or removed."""
        self._known.pop(str(path.relative_to(self._folder)), None)

    def record(self) -> Record:
        """What the folder holds now. Only whole lines of metrics.jsonl count."""
        lines = _metrics(self._folder)
        whole = lines[: lines.rfind(b"\n") + 1]
        found = dict(step_files(self._folder))
        self._known = {name: value for name, value in self._known.items() if name in found}
        for name, path in found.items():
            if name not in self._known:
                self._known[name] = _fingerprint(path)
        return Record(_rows(whole), dict(self._known))

    def differences(self, record: Record, step: int) -> list[str]:
        """In what the folder differs from what ``record``, of a checkpoint after ``step``, says; empty where nothing
        does. What came after that step is no difference."""
        lines = _metrics(self._folder)
        out = []
        if _rows(lines[: record.rows.size]) != record.rows:
            out.append(_rows_differ(lines, record.rows, step))
        found = dict(step_files(self._folder))
        gone = [name for name in sorted(record.files) if name not in found]
        if gone:
            out.append(f"{len(gone)} of {len(record.files)} files of steps are missing: {_some(gone)}")
        other = [n for n in sorted(record.files) if n in found and _fingerprint(found[n]) != record.files[n]]
        if other:
            out.append(f"changed or cut off since then: {_some(other)}")
        # An evaluation after the very step may have come after its checkpoint.
        strange = [
            name
            for name, path in found.items()
            if name not in record.files and int(path.stem) <= step - name.startswith("evals/")
        ]
        if strange:
            out.append(f"not made by this run before that step: {_some(strange)}")
        return out


def step_files(folder: Path) -> Iterable[tuple[str, Path]]:
    """The files of single steps in a run's folder, by their paths in it."""
    for kind, suffix in KINDS.items():
        for path in sorted((folder / kind).glob(f"*{suffix}")):
            if re.fullmatch(r"[0-9]{1,18}", path.stem):
                yield f"{kind}/{path.name}", path


def _metrics(folder: Path) -> bytes:
    try:
        return (folder / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return b""


def _rows(lines: bytes) -> Rows:
    return Rows(lines.count(b"\n"), len(lines), hashlib.sha256(lines).hexdigest())


def _rows_differ(lines: bytes, rows: Rows, step: int) -> str:
    """In which way metrics.jsonl is not what it was, as far as its steps tell."""
    found = [row for line in lines.splitlines() if (row := decode_row(line)) is not None and row["step"] <= step]
    each = Counter(row["step"] for row in found if "eval_accuracy" not in row)
    missing = [str(s) for s in range(1, step + 1) if not each[s]]
    twice = [str(s) for s, count in sorted(each.items()) if count > 1]
    text = f"metrics.jsonl: {len(found)} rows up to step {step}, {rows.count} when the checkpoint was made"
    text += f"; no row of step {_some(missing)}" if missing else ""
    text += f"; more than one of step {_some(twice)}" if twice else ""
    return text if len(found) != rows.count or missing or twice else f"{text}: lines were changed or moved"


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return f"{path.stat().st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
