"""The metrics of a run as columns, read line by line as the file grows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..diagnostics.health import Facts, Health, finite
from ..runs.report import safe_files
from ..runs.rows import decode_row
from ..utils.metric_rows import is_evaluation
from .rounds import round_row
from .signature import signature

_ENDS = 4096
_STEPS = 2**53  # whole numbers below it are exact in JavaScript


class Curves:
    """The rows of one metrics file, so far. A column has one number per step, NaN where the step has none."""

    def __init__(self, facts: Facts, *, number: int = 1) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.evals: dict[int, dict[str, Any]] = {}
        self.health = Health(facts)
        self.held: dict[str, list[list[int | None]]] = {}  # rule -> the stretches of steps in which it held
        self.bad_lines = 0
        # Of what was read from a beginning: another one where rows were taken back, or are of another run.
        self.number = number

    def add(self, line: bytes) -> None:
        """Adds a whole line; counts one that is no row."""
        row = decode_row(line) or round_row(line)
        if row is None or not 0 <= row["step"] < _STEPS:
            self.bad_lines += 1
        elif is_evaluation(row):
            self.evals[row["step"]] = row
        else:
            self._add_step(row)

    def _add_step(self, row: Mapping[str, Any]) -> None:
        count = len(self.steps)
        self.steps.append(row["step"])
        for name, value in row.items():
            number = finite(value)
            if name == "step" or (number is None and name not in self.columns):
                continue
            column = self.columns.get(name)
            if column is None:
                # A metric that begins late has NaN in all rows before.
                column = self.columns[name] = array("d", [math.nan]) * count
            column.append(math.nan if number is None else number)
        # And NaN in this row where it is missing.
        for column in self.columns.values():
            if len(column) == count:
                column.append(math.nan)
        self.health.observe(row)
        # Step 0 stands for the beginning where there is no row before.
        self._note_stretches(row["step"], previous=self.steps[-2] if count else 0)

    def _note_stretches(self, step: int, previous: int) -> None:
        for rule, stretches in self.held.items():
            # It held until the step before this one.
            if rule not in self.health.holding and stretches[-1][1] is None:
                stretches[-1][1] = previous
        for rule in self.health.holding:
            stretches = self.held.setdefault(rule, [])
            # None as an end: it still holds.
            if not stretches or stretches[-1][1] is not None:
                stretches.append([step, None])

    def rows(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """Rows with some of the columns."""
        found: list[dict[str, Any]] = [{"step": step} for step in self.steps]
        for name in names:
            # Not strict: a column that no row has is empty.
            for row, value in zip(found, self.columns.get(name, ()), strict=False):
                if not math.isnan(value):
                    row[name] = value
        return found


class MetricsFile:
    """Follows a metrics file: reads what was appended since, or all of it where it was replaced."""

    def __init__(self, folder: Path, name: str, *, begun: int = 0) -> None:
        self.folder, self.name = folder, name
        self.begun = begun  # how often it was read from its beginning
        self.curves: Curves | None = None
        self._at = 0  # everything before is read
        self._head = self._tail = b""  # the first and last bytes before it: if they differ, the file is another one
        self._facts: Facts | None = None
        self._seen: object = None
        self.problem = ""

    def read(self, config: Mapping[str, Any]) -> Curves:
        """The rows so far; a partial last line waits until it is whole."""
        # Health rules depend on settings: another configuration judges all rows again.
        facts, seen = Facts.of(config), signature(self.folder / self.name)
        if self.curves is not None and facts == self._facts and seen is not None and seen == self._seen:
            return self.curves
        self._seen = seen  # of before it is read: what is written meanwhile is read the next time
        # ---- what is new of the file; all of it where it is another one
        if self.curves is None or facts != self._facts:
            self._begin(facts)
        try:
            with safe_files.open_file(self.folder, self.name, most=safe_files.METRICS_BYTES) as file:
                # Reads the last bytes once more, and the first ones, to see that this is still the same file.
                back, head = max(self._at - _ENDS, 0), file.read(len(self._head))
                file.seek(back)
                data = file.read()
                if head != self._head or data[: self._at - back] != self._tail:
                    self._begin(facts)
                    file.seek(0)
                    back, data = 0, file.read()
            self.problem = ""
        except OSError as error:
            # What was read of a file that is gone no longer counts.
            if self._at:
                self._begin(facts)
            missing = isinstance(error, FileNotFoundError)
            self.problem = "" if missing else f"{self.name}: {error.strerror}"
            data, back = b"", 0
        assert self.curves is not None
        # ---- whole lines of it
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole[self._at - back :].splitlines():
            self.curves.add(line)
        if len(whole) > self._at - back:
            self._at = back + len(whole)
            # The first bytes change only while the file is shorter than they may be.
            self._head = self._head if back else whole[:_ENDS]
            self._tail = whole[-_ENDS:]
        return self.curves

    def _begin(self, facts: Facts) -> None:
        self.begun += 1
        self.curves, self._at, self._facts = Curves(facts, number=self.begun), 0, facts
        self._head = self._tail = b""
