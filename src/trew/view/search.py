"""Finds completions by a text in them, whatever its case. Reads texts table by table and keeps only what matched."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from . import table
from .index import THREADS, Index
from .signature import Signature
from .viewed import ViewedRun

LONGEST = 200
_TEXTS = 8
Hits = dict[tuple[int, Signature | None], np.ndarray]


class Searches:
    """The last searches: which rows of which tables matched. Paging and sorting a result reads nothing again."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Hits] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, run: ViewedRun, index: Index, text: str, among: np.ndarray, columns: tuple[str, ...]) -> np.ndarray:
        """Which rows of the index contain ``text`` in one of ``columns``, of those in the mask ``among``."""
        key = (run.id, index.kind, text, columns)
        with self._lock:
            matched = self._known.pop(key, {})
            self._known[key] = matched
            while len(self._known) > _TEXTS:
                self._known.popitem(last=False)
        out, starts = np.zeros(len(among), bool), index.starts
        asked = {step: slice(at, at + len(index.parts[step])) for step, at in starts.items()}
        asked = {step: part for step, part in asked.items() if among[part].any()}
        keys = {step: (step, run.table_signature(index.kind, step)) for step in asked}
        missing = [step for step in asked if keys[step] not in matched]
        with ThreadPoolExecutor(THREADS) as pool:  # pyarrow reads and searches without Python's lock
            found = pool.map(lambda step: _matches(run, index.kind, step, text, columns), missing)
            matched.update(zip([keys[step] for step in missing], found, strict=True))
        for step, part in asked.items():
            hits = matched[keys[step]]
            if len(hits) == part.stop - part.start:  # else the table was replaced since the index was made
                out[part] = hits
        return out & among


def _matches(run: ViewedRun, kind: str, step: int, text: str, columns: tuple[str, ...]) -> np.ndarray:
    from pyarrow import compute

    try:
        found = table.read(run.folder, kind, step, columns)
    except table.Unreadable:
        return np.zeros(0, bool)
    out = np.zeros(found.num_rows, bool)
    for name in found.column_names:
        column = found[name].combine_chunks()
        hits = compute.match_substring(column, text, ignore_case=True)  # pyright: ignore[reportAttributeAccessIssue]
        out |= hits.fill_null(False).to_numpy(zero_copy_only=False)
    return out
