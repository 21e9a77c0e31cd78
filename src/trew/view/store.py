"""What the server keeps in memory of the runs' completions, up to a number of bytes over all runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .index import Index
from .rows import KINDS, Tables
from .search import Searches
from .viewed import ViewedRun

_KEPT_BYTES = 1 << 30
_WARMED, _RESULTS = 3, 32


class Store:
    """Indexes, tables and searches. The runs that were looked at last stay; the others are read again when needed."""

    def __init__(self) -> None:
        self.tables, self.searches = Tables(), Searches()
        self._indexes: OrderedDict[tuple[str, bool], Index] = OrderedDict()
        # By run and name: of which index, at which version, and what was made of it.
        self._results: OrderedDict[object, tuple[tuple[Index, int], Any]] = OrderedDict()
        self._lock = threading.RLock()  # of the dictionaries; an index is guarded by its run's lock

    def index(self, run: ViewedRun, eval: bool) -> Index:
        """The index of a run's training or evaluation completions, as the folder is now. Hold the run's lock."""
        with self._lock:
            key, scored = (run.id, eval), not run.given
            # Taken out and put in again: the index that was used last is at the end.
            found = self._indexes.pop(key, None)
            # A run of another kind may have taken the folder over: whether its tables have rewards has changed then.
            if found is None or found.scored != scored:
                found = Index(run.folder, KINDS[eval], scored=scored)
            self._indexes[key] = found
            self._make_room()
        # Outside the lock: reading takes long, and the caller holds the run's own.
        found.update(run.steps_of(KINDS[eval]))
        return found

    def kept(self, run: ViewedRun, name: str, index: Index, make: Callable[[], Any]) -> Any:
        """What ``make`` computes from an index, until that changes."""
        # The index itself too: one that was made anew begins at version 0 again.
        key, version = (run.id, name), (index, index.version)
        with self._lock:
            known = self._results.get(key)
        if known is None or known[0] != version:
            known = (version, make())
        with self._lock:
            self._results[key] = known
            self._results.move_to_end(key)
            while len(self._results) > _RESULTS:
                self._results.popitem(last=False)
        return known[1]

    def warm(self, runs: list[ViewedRun]) -> None:
        """Reads the indexes of the runs that changed last, before anybody asks for them."""
        for run in sorted(runs, key=lambda run: run.updated, reverse=True)[:_WARMED]:
            for eval in KINDS:
                with run.lock:
                    self.index(run, eval)

    def _make_room(self) -> None:
        # Two stay: the training and the evaluation index of the run that is looked at.
        while len(self._indexes) > 2 and sum(index.bytes for index in self._indexes.values()) > _KEPT_BYTES:
            _, gone = self._indexes.popitem(last=False)
            # What was computed from it holds it in memory.
            for key in [key for key, ((index, _), _) in self._results.items() if index is gone]:
                del self._results[key]
