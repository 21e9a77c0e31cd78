"""Records what a run folder held when a checkpoint was saved: the number of rows, and every file with its hash.

A resumed run appends to what is there. If rows or completions from before the checkpoint are missing, duplicated,
truncated or changed, its report would be silently wrong; so the whole folder is compared with the record before
anything is written.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..utils.metric_rows import is_evaluation
from ..utils.shapes import Count
from .rows import decode_row

KINDS = {"rollouts": ".parquet", "evals": ".parquet", "bad_steps": ".json"}
"""The folders with one file per step, and the suffix of those files."""

_SHOWN = 5  # missing files or steps that a message names; it counts the others


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """The rows of metrics.jsonl: their number, and the size in bytes and SHA-256 of their lines."""

    count: Count
    size: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """The rows and files at a checkpoint. ``files`` maps a path in the run folder to "size sha256"."""

    rows: RowsRecord
    files: dict[str, str]


class Recorder:
    """Makes records of a run folder. Reads each file once, and again only after :meth:`forget`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[str, str] = {}

    def forget(self, path: Path) -> None:
        """Forgets a file's hash; call it before the file is written or removed."""
        self._known.pop(str(path.relative_to(self._folder)), None)

    def record(self) -> Record:
        """Records what the folder holds now. Counts only complete lines of metrics.jsonl."""
        lines = _metrics(self._folder)
        # rfind gives -1 if there is no newline, and so an empty prefix.
        whole = lines[: lines.rfind(b"\n") + 1]
        found = dict(step_files(self._folder))
        # Drops files that are gone, then hashes only those that are new.
        self._known = {name: value for name, value in self._known.items() if name in found}
        for name, path in found.items():
            if name not in self._known:
                self._known[name] = _fingerprint(path)
        return Record(_rows(whole), dict(self._known))

    def differences(self, record: Record, step: int) -> list[str]:
        """Compares the folder with the ``record`` of a checkpoint after ``step``; returns one line per difference.

        Rows and files of later steps are not differences: the run went on after its checkpoint.
        """
        lines = _metrics(self._folder)
        out = []
        # Only the recorded prefix: rows after it are of later steps.
        if _rows(lines[: record.rows.size]) != record.rows:
            out.append(_rows_differ(lines, record.rows, step))
        found = dict(step_files(self._folder))
        if gone := sorted(record.files.keys() - found.keys()):
            out.append(f"{len(gone)} of {len(record.files)} files of steps are missing: {_some(gone)}")
        if changed := _changed(record.files, found):
            out.append(f"changed or truncated since then: {_some(changed)}")
        if foreign := _foreign(record.files, found, step):
            out.append(f"not written by this run before that step: {_some(foreign)}")
        return out


def _changed(recorded: Mapping[str, str], found: Mapping[str, Path]) -> list[str]:
    return [name for name in sorted(recorded) if name in found and _fingerprint(found[name]) != recorded[name]]


def _foreign(recorded: Mapping[str, str], found: Mapping[str, Path], step: int) -> list[str]:
    """Files of steps that the checkpoint must have seen, but did not record.

    An evaluation belongs to the weights after its step, and so may come after the checkpoint of the same step.
    """
    return [
        name
        for name, path in found.items()
        if name not in recorded and int(path.stem) <= step - name.startswith("evals/")
    ]


def step_files(folder: Path) -> Iterable[tuple[str, Path]]:
    """Yields the files that belong to one step each: path in the run folder, and full path."""
    for kind, suffix in KINDS.items():
        for path in sorted((folder / kind).glob(f"*{suffix}")):
            if re.fullmatch(r"[0-9]{1,18}", path.stem):
                yield f"{kind}/{path.name}", path


def _metrics(folder: Path) -> bytes:
    try:
        return (folder / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return b""


def _rows(lines: bytes) -> RowsRecord:
    return RowsRecord(lines.count(b"\n"), len(lines), hashlib.sha256(lines).hexdigest())


def _rows_differ(lines: bytes, rows: RowsRecord, step: int) -> str:
    """Describes how metrics.jsonl differs from its record, as far as the steps of its rows show."""
    decoded = map(decode_row, lines.splitlines())
    found = [row for row in decoded if row is not None and row["step"] <= step]
    # A step has one training row and may have an evaluation row as well, which is no repetition.
    each = Counter(row["step"] for row in found if not is_evaluation(row))
    text = f"metrics.jsonl: {len(found)} rows up to step {step}, {rows.count} when the checkpoint was saved"
    wrong = _missing_or_repeated(each, step)
    if not wrong and len(found) == rows.count:
        return f"{text}: lines were changed or moved"
    return text + wrong


def _missing_or_repeated(rows_by_step: Counter[int], step: int) -> str:
    # Steps are numbered from 1; step 0 has an evaluation only.
    missing = [str(s) for s in range(1, step + 1) if not rows_by_step[s]]
    repeated = [str(s) for s, count in sorted(rows_by_step.items()) if count > 1]
    text = f"; no row of step {_some(missing)}" if missing else ""
    return text + (f"; more than one of step {_some(repeated)}" if repeated else "")


def _fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return f"{path.stat().st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
