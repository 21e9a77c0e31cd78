"""Reads a run folder as it is: finished, running, or broken off; what cannot be read is named, not guessed."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...diagnostics import health
from ...diagnostics.outcome import outcome
from ...errors import DataError
from ..folder import decode_row

_IDENTITY = ("step", "uid", "sample", "prompt", "columns")
_ANSWER = ("completion", "score", "status", "parts", "extracted", "finish_reason", "token_ids")


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything a report shows of one run."""

    folder: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]  # empty while the run is not finished
    notes: tuple[str, ...] = field(default=())  # what could not be read

    def column(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric, in the order of steps; None where it was not a finite number.

        Steps that do not have the metric at all are left out.
        """
        pairs = [(row["step"], row[name]) for row in self.rows if _is_number(row.get(name))]
        pairs.sort(key=lambda pair: pair[0])
        return [s for s, _ in pairs], [v if math.isfinite(v) else None for _, v in pairs]

    @property
    def health(self) -> list[health.Finding]:
        """The warnings of its metrics, in the order of steps: those that were given while it ran."""
        return health.findings(self.rows, self.config)

    @property
    def outcome(self) -> list[str]:
        """What the end of a finished run says of it as a whole: that nothing was learned, and why."""
        return outcome(self.rows, self.config) if self.summary else []

    def metric_names(self) -> list[str]:
        """Every numeric column, in the order of first appearance."""
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if k != "step" and _is_number(v)))


def load_run(folder: Path) -> RunData:
    """Reads a run's folder; raises DataError where there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder; give the folder that `trew train` wrote (runs/…)")
    if not any((folder / name).exists() for name in ("metrics.jsonl", "summary.json", "config.toml")):
        raise DataError(f"{folder}: is not a run's folder: it has no metrics.jsonl, summary.json or config.toml")
    notes: list[str] = []
    config_text = _read(folder / "config.toml", notes)
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        config_text=config_text,
        config=_parse(config_text, "config.toml", tomllib.loads, notes),
        rows=_rows(_read(folder / "metrics.jsonl", notes), notes),
        summary=_parse(_read(folder / "summary.json", []), "summary.json", json.loads, notes),
        notes=tuple(notes),
    )


def _read(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
        return ""


def _parse(text: str, name: str, loads: Any, notes: list[str]) -> Mapping[str, Any]:
    if not text.strip():
        return {}
    try:
        table = loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{name}: cannot be read: {error}")
        return {}
    return table if isinstance(table, dict) else {}


def _rows(text: str, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    *lines, partial = text.split("\n")
    rows = [decode_row(line) for line in lines]
    bad = sum(row is None for row in rows)
    if bad or partial:
        notes.append(f"metrics.jsonl: {bad + bool(partial)} lines are incomplete or no metrics rows and were left out")
    return tuple(row for row in rows if row is not None)


def load_samples(folder: Path, *, kind: str, step: int | None = None, most: int = 64) -> list[dict[str, Any]]:
    """The first ``most`` completions of one parquet file of ``rollouts`` or ``evals``: that of ``step``, else the last
    one. Nothing where there is no such file or it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [p for p in (folder / kind).glob("*.parquet") if p.stem.isdecimal()]
    if step is not None:
        files = [p for p in files if int(p.stem) == step]
    if not files:
        return []
    try:
        with pq.ParquetFile(max(files, key=lambda p: int(p.stem))) as file:
            columns = [c for c in _IDENTITY + _ANSWER if c in file.schema_arrow.names]
            batch = next(file.iter_batches(batch_size=most, columns=columns), None)
    except (OSError, pa.ArrowException):
        return []
    return [] if batch is None else [{**r, "parts": dict(r.get("parts") or ())} for r in batch.to_pylist()]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
