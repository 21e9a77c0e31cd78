"""The results of a study as one file: what was fixed, what was chosen, and every run with all of its figures."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .design import Cell, Study
from .history import History
from .rows import Row


def assemble(
    study: Study, models: Mapping[str, Any], chosen: Mapping[Cell, float | None], rows: Sequence[Row], history: History
) -> dict[str, Any]:
    """Everything as plain values, in an order that does not depend on when a run ended."""
    ordered = sorted(rows, key=lambda row: (row.seed, row.task, row.regime, row.algorithm, row.value or 0.0))
    # Runs at a value that is no longer chosen stay on the disk, and are not reported.
    counted = [row for row in ordered if row.seed not in study.tuning and _is_chosen(row, chosen)]
    return {
        "study": study.name,
        "digest": study.digest,
        "design": study.to_json(),
        "changed": history.lines(),
        # Empty for a design that never changed: ``design`` says it all.
        "history": list(history.designs) if len(history.designs) > 1 else [],
        # ``design`` is only for the study's own folder, to know its models again.
        "models": {task: {k: v for k, v in about.items() if k != "design"} for task, about in models.items()},
        "chosen": {cell.name: value for cell, value in sorted(chosen.items())},
        "machine": {"python": platform.python_version(), "system": platform.platform(terse=True)},
        "tuning": [row.to_json() for row in ordered if row.seed in study.tuning],
        "runs": [row.to_json() for row in counted],
    }


def _is_chosen(row: Row, chosen: Mapping[Cell, float | None]) -> bool:
    return row.run.cell in chosen and chosen[row.run.cell] == row.value


def rows_of(found: Mapping[str, Any], kind: str) -> list[Row]:
    """The rows of results that were read from a file: ``tuning`` or ``runs``."""
    return [Row.from_json(row) for row in found[kind]]


def text(found: Mapping[str, Any]) -> str:
    """Results as JSON with one run on a line."""
    lines = []
    for key, value in found.items():
        if key in ("tuning", "runs") and value:
            rows = ",\n".join(json.dumps(row) for row in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """A file's content; empty if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
