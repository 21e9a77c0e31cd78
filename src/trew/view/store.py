"""What the server keeps in memory of the runs' completions, up to a number of bytes over all runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .index import Index
from .rows import KINDS, Tables
from .search import Searches
from .viewed import ViewedRun

_KEPT_BYTES = 1 << 30


class Store:
    """Indexes, tables and searches. The runs that were looked at last stay; the others are read again when needed."""

    def __init__(self) -> None:
        self.tables, self.searches = Tables(), Searches()
        self._indexes: OrderedDict[tuple[str, bool], Index] = OrderedDict()
        self._results: OrderedDict[object, Any] = OrderedDict()

    def index(self, run: ViewedRun, eval: bool) -> Index:
        """The index of a run's training or evaluation completions, as the folder is now. Hold the run's lock."""
        key = (run.id, eval)
        found = self._indexes.pop(key, None) or Index(run.folder, KINDS[eval])
        self._indexes[key] = found
        found.update(run.steps_of(KINDS[eval]))
        self._make_room()
        return found

    def kept(self, run: ViewedRun, name: str, index: Index, make: Callable[[], Any]) -> Any:
        """What ``make`` computes from an index, until that changes."""
        key = (run.id, name)
        known = self._results.pop(key, None)
        if known is None or known[0] is not index or known[1] != index.version:
            known = (index, index.version, make())
        self._results[key] = known
        while len(self._results) > 32:
            self._results.popitem(last=False)
        return known[2]

    def _make_room(self) -> None:
        while len(self._indexes) > 2 and sum(index.bytes for index in self._indexes.values()) > _KEPT_BYTES:
            self._indexes.popitem(last=False)
