"""Finds completions by a text in them, whatever its case: of their tables, the texts that were read last are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import table
from .index import THREADS, Index
from .signature import Signature
from .viewed import ViewedRun

LONGEST = 200
_TEXTS = 8
_KEPT_BYTES = 256 << 20
Hits = dict[tuple[int, Signature | None], np.ndarray]


class Searches:
    """The last searches: which rows of which tables matched. Paging and sorting a result reads nothing again."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Hits] = OrderedDict()
        self._columns: OrderedDict[object, Any] = OrderedDict()
        self._bytes = 0  # of the columns
        self._lock = threading.Lock()

    def mask(self, run: ViewedRun, index: Index, text: str, among: np.ndarray, columns: tuple[str, ...]) -> np.ndarray:
        """Which rows of the index contain ``text`` in one of ``columns``, of those in the mask ``among``."""
        key = (run.id, index.kind, text, columns)
        with self._lock:
            # Removed and put back: the newest entry is at the end.
            matched = self._known.pop(key, {})
            self._known[key] = matched
            while len(self._known) > _TEXTS:
                self._known.popitem(last=False)
        out, starts = np.zeros(len(among), bool), index.starts
        asked = {step: slice(at, at + len(index.parts[step])) for step, at in starts.items()}
        # Tables without a row in question are not read.
        asked = {step: part for step, part in asked.items() if among[part].any()}
        keys = {step: (step, run.table_signature(index.kind, step)) for step in asked}
        missing = [step for step in asked if keys[step] not in matched]
        with ThreadPoolExecutor(THREADS) as pool:  # pyarrow reads and searches without Python's lock
            found = pool.map(lambda step: self._matches(run, index.kind, step, text, columns), missing)
            # Another thread may search for the same meanwhile; both compute the same.
            matched.update(zip([keys[step] for step in missing], found, strict=True))
        for step, part in asked.items():
            hits = matched[keys[step]]
            if len(hits) == part.stop - part.start:  # else the table was replaced since the index was made
                out[part] = hits
        return out & among

    def _matches(self, run: ViewedRun, kind: str, step: int, text: str, columns: tuple[str, ...]) -> np.ndarray:
        from pyarrow import compute

        found = self._texts(run, kind, step, columns)
        out = np.zeros(len(found[0]) if found else 0, bool)
        for column in found:
            hits = compute.match_substring(column, text, ignore_case=True)  # pyrefly: ignore[missing-attribute]
            out |= hits.fill_null(False).to_numpy(zero_copy_only=False)
        return out

    def _texts(self, run: ViewedRun, kind: str, step: int, names: tuple[str, ...]) -> list[Any]:
        """Columns of text of a table; none if it cannot be read."""
        table_key = (run.id, kind, step, run.table_signature(kind, step))
        with self._lock:
            known = {name: self._columns.get((table_key, name)) for name in names}
            for name in names:
                if known[name] is not None:
                    self._columns.move_to_end((table_key, name))
        if missing := [name for name in names if known[name] is None]:
            try:
                found = table.read(run.folder, kind, step, missing)
            except table.Unreadable:
                return []
            known |= {name: found[name].combine_chunks() for name in found.column_names}
            self._keep({(table_key, name): known[name] for name in found.column_names})
        return [column for column in known.values() if column is not None]

    def _keep(self, columns: dict[object, Any]) -> None:
        with self._lock:
            for key, column in columns.items():
                # Another thread may have read the same column meanwhile.
                self._bytes += column.nbytes - (self._columns[key].nbytes if key in self._columns else 0)
                self._columns[key] = column
            while self._bytes > _KEPT_BYTES and len(self._columns) > 1:
                self._bytes -= self._columns.popitem(last=False)[1].nbytes
