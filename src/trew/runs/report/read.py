"""Reads a run folder in any state: finished, running or interrupted. Names what it cannot read and never guesses."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import PAIRED
from ...diagnostics.health import HealthWarning, findings
from ...diagnostics.outcome import outcome
from ...errors import DataError, nearest
from ...utils.metric_rows import is_evaluation
from .. import changes
from ..changes import RunChange
from ..folder import decode_row
from ..metric_help import HELP, is_known
from ..rollouts import schema
from . import safe_files

_STEPS = 2**53  # whole numbers below it are exact in a float
_IDENTITY = ("step", "uid", "sample", "prompt", "columns")
_ANSWER = ("completion", "score", "status", "parts", "extracted", "finish_reason", "token_ids")
_EPISODE = ("turns", "ending", "rollout_error")  # of runs with an environment; older folders lack some of them


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run folder says: its configuration, its ``rows`` of metrics.jsonl, its summary."""

    folder: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]  # empty while the run is not finished
    notes: tuple[str, ...] = field(default=())  # files and lines that could not be read
    changes: tuple[RunChange, ...] = ()

    def column(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric, ordered by step; None if the value was not finite.

        Leaves out steps without the metric; empty for one of docs/runs.md that this run never had. Raises DataError for
        any other name.
        """
        known = dict.fromkeys(key for row in self.rows for key in row if key != "step")
        # Of a run that has just begun not every name is known.
        begun = not all(is_evaluation(row) for row in self.rows)
        if begun and name not in known and not is_known(name, known):
            raise DataError(
                f"column: {self.folder} has no metric {name!r}{nearest(name, [*known, *HELP])}; it has "
                f"{', '.join(known)}"
            )
        return points(self.rows, name)

    @property
    def health(self) -> list[HealthWarning]:
        """The warnings that the run gave about its metrics, ordered by step."""
        return findings(self.rows, self.config)

    @property
    def changed(self) -> list[str]:
        """A sentence for each place at which it went on under other settings."""
        return [change.told() for change in self.changes]

    @property
    def arithmetic(self) -> str:
        """How its numbers were rounded, besides by versions: "cpu, 2 threads, trew's kernels". Empty if not known."""
        known = self.summary.get("arithmetic")
        if not isinstance(known, Mapping):
            return ""
        count = str(known.get("threads", ""))
        threads = f"{count} thread{'s' * (count != '1')}" if count else ""
        kernels = f"{known['kernels']} kernels" if "kernels" in known else ""
        return ", ".join(filter(None, (str(known.get("device", "")), threads, kernels)))

    @property
    def outcome(self) -> list[str]:
        """Findings about a finished run as a whole, such as that nothing was learned, and why."""
        return outcome(self.rows, self.config) if self.summary else []

    def completions(self, step: int | None = None, *, kind: str = "rollouts", most: int = 64) -> list[dict[str, Any]]:
        """The first ``most`` completions of a step with score, parts and status, by default of the last step; with
        ``kind="evals"`` of an evaluation. Raises DataError for a step that has none."""
        if kind not in ("rollouts", "evals"):  # without a check, a mistyped one has no completions
            raise DataError(f"kind: got {kind!r}, accepts 'rollouts' or 'evals'")
        there = sample_steps(self.folder, kind)
        if step is not None and step not in there:
            raise DataError(f"step: got {step}, but {self.folder} has no {kind} of it; {_told(there, step)}")
        return load_samples(self.folder, kind=kind, step=step, most=most)

    def metric_names(self) -> list[str]:
        """Every numeric column, in order of first appearance."""
        return list(dict.fromkeys(k for row in self.rows for k, v in row.items() if k != "step" and _is_number(v)))


def points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float | None]]:
    """Steps and values of any column, ordered by step; none if no row has it."""
    pairs = [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]
    pairs.sort(key=lambda pair: pair[0])
    return [s for s, _ in pairs], [v if math.isfinite(v) else None for _, v in pairs]


def _told(steps: Sequence[int], wanted: int) -> str:
    """Which steps there are, in a few words.

    >>> _told([1, 2, 4, 8], 5), _told([0], 5), _told([], 5)
    ('there are 4 steps from 1 to 8, the nearest is 4', 'there is step 0 alone', 'there are none of any step')
    """
    if len(steps) < 2:
        return f"there is step {steps[0]} alone" if steps else "there are none of any step"
    close = min(steps, key=lambda step: abs(step - wanted))
    return f"there are {len(steps)} steps from {steps[0]} to {steps[-1]}, the nearest is {close}"


def given_by_data(config: Mapping[str, Any]) -> str:
    """``demonstrations`` or ``pairs`` where that is what a run's completions are, by its config.toml: its data gave
    them, and no reward judged them. Empty for all others.

    >>> given_by_data({"data": {"task": "pairs"}}), given_by_data({"data": [{"task": "rollouts"}]}), given_by_data({})
    ('pairs', '', '')
    """
    found = config.get("data")
    sets = found if isinstance(found, list) else [found]
    tasks = [one.get("task") if isinstance(one, dict) else None for one in sets]
    return next((task for task in ("demonstrations", PAIRED) if tasks and all(one == task for one in tasks)), "")


def name_of_given(given: str, sample: int) -> str:
    """What a completion is that the data gave: the answers of a pair come in one order."""
    return {0: "chosen", 1: "rejected"}.get(sample, "") if given == PAIRED else "demonstration"


def load_run(folder: str | Path) -> RunData:
    """Reads a run folder, of a run that trains too; raises DataError if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder; give the folder that `trew train` wrote (runs/…)")
    if not any(safe_files.exists(folder, name) for name in ("metrics.jsonl", "summary.json", "config.toml")):
        inner = next((path for path in sorted(folder.iterdir()) if (path / "config.toml").is_file()), None)
        hint = f"; it contains runs: name them, such as {inner}" if inner else ""
        raise DataError(f"{folder}: is not a run folder: it has no metrics.jsonl, summary.json or config.toml{hint}")
    notes: list[str] = []
    config_text = _read(folder, "config.toml", notes)
    config = _parse(config_text, "config.toml", tomllib.loads, notes)
    if "iterate" in config or safe_files.exists(folder, "rounds.jsonl"):
        raise DataError(
            f"{folder}: is a run of trew iterate, whose own report.html is about its rounds; name the training of a "
            f"round, such as {folder / 'round-01' / 'policy'}"
        )
    metrics = _read(folder, "metrics.jsonl", notes, most=safe_files.METRICS_BYTES)
    summary = _read(folder, "summary.json", notes) if safe_files.exists(folder, "summary.json") else ""
    changed = _read(folder, changes.FILE, notes) if safe_files.exists(folder, changes.FILE) else ""
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        config_text=config_text,
        config=config,
        rows=_rows(metrics, notes),
        summary=_plain(_parse(summary, "summary.json", json.loads, notes)),
        changes=_changes(changed, notes),
        notes=tuple(notes),
    )


def _changes(text: str, notes: list[str]) -> tuple[RunChange, ...]:
    found = changes.read(text)
    if bad := len(text.splitlines()) - len(found):
        notes.append(f"{changes.FILE}: left out {bad} lines that tell of no change")
    return tuple(found)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names runs by their folders, with as many of their parents as it takes to tell them apart.

    >>> names_of([Path("/runs/grpo/0.001/1"), Path("/runs/dapo/0.001/1"), Path("/runs/grpo/0.001/2")])
    ['grpo/0.001/1', 'dapo/0.001/1', '2']
    """
    parts = [folder.resolve().parts for folder in folders]

    def name(own: tuple[str, ...]) -> str:
        ends = (own[-count:] for count in range(1, len(own) + 1))
        # A folder that is given twice has one name.
        alone = (end for end in ends if all(other[-len(end) :] != end or other == own for other in parts))
        return str(Path(*next(alone, own)))

    return [name(own) for own in parts]


def _read(folder: Path, name: str, notes: list[str], *, most: int = safe_files.TEXT_BYTES) -> str:
    try:
        return safe_files.read_text(folder, name, most=most)
    except OSError as error:
        notes.append(f"{name}: {error.strerror}")
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
    # A running or killed run may end in the middle of a row.
    *lines, partial = text.split("\n")
    rows = [row for row in map(decode_row, lines) if row is not None and 0 <= row["step"] < _STEPS]
    bad = len(lines) - len(rows) + bool(partial)
    if bad:
        notes.append(f"metrics.jsonl: left out {bad} lines that are incomplete or not metrics rows")
    left_out: dict[str, int] = {}
    numeric = [_numeric(row, left_out) for row in rows]
    notes += [f"metrics.jsonl: left out {count} values of {name} that are not numbers"
              for name, count in left_out.items()]  # fmt: skip
    return tuple(numeric)


def _numeric(row: Mapping[str, Any], left_out: dict[str, int]) -> dict[str, Any]:
    """Keeps the row's nulls and numbers, converted to what a float can hold; counts everything else by name."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        if value is None or _is_number(value):
            kept[name] = _plain(value)
        elif not isinstance(value, bool):
            left_out[name] = left_out.get(name, 0) + 1
    return kept


def _plain(value: Any) -> Any:
    """Replaces whole numbers that are too large for a float by an infinity, which is how JSON reads 1e999."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def sample_steps(folder: Path, kind: str) -> list[int]:
    """The steps with a file in ``rollouts`` or ``evals``, in order; none if that folder cannot be read."""
    try:
        names = safe_files.file_names(folder, kind)
    except OSError:
        return []
    stems = (name.removesuffix(".parquet") for name in names if name.endswith(".parquet"))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal())


def load_samples(
    folder: Path, *, kind: str, step: int | None = None, most: int = 64, uid: str = ""
) -> list[dict[str, Any]]:
    """The first ``most`` completions from the parquet file of ``step``, by default the last one, in ``rollouts`` or
    ``evals``; with ``uid``, only those of that prompt. Returns nothing if there is no such file, or if its columns are
    not those that a run writes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    steps = [at for at in sample_steps(folder, kind) if step is None or at == step]
    if not steps:
        return []
    try:
        with (
            safe_files.open_file(folder, f"{kind}/{steps[-1]:06d}.parquet", most=safe_files.TABLE_BYTES) as opened,
            pq.ParquetFile(opened) as file,
        ):
            columns = _columns_to_read(file.schema_arrow)
            # The first batch only: the rest of a large table is never read.
            batch = next(file.iter_batches(batch_size=most, columns=columns), None) if columns else None
            if batch is not None and uid:
                batch = batch.filter(pa.array([each == uid for each in batch["uid"].to_pylist()]))
            rows = [] if batch is None else batch.to_pylist()
    except (OSError, pa.ArrowException, ValueError):  # damage may show only once the rows are read
        return []
    return [{**row, "parts": dict(row["parts"] or ())} for row in rows]


def _columns_to_read(stored: Any) -> list[str]:
    """The columns that the page shows, those of episodes included if the table has them; none if a type differs."""
    # Types are compared before any row is read: the page relies on them, and the file may come from anywhere.
    there = {field.name: field.type for field in stored}

    def fit(names: Sequence[str]) -> bool:
        return all(there.get(name) == schema().field(name).type for name in names)

    needed = [*_IDENTITY, *_ANSWER]
    if not fit(needed):
        return []
    episode = [name for name in _EPISODE if name in schema().names]
    return needed + episode if fit(episode) else needed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
