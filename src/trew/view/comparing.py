"""`trew compare` in the page: computed when it is asked for, and kept until one of the runs changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, get_args

from ..errors import TrewError
from .answers import BadRequest, Refused
from .parameters import Parameters
from .viewed import ViewedRun

_KEPT = 8


class Comparisons:
    """The comparisons that were computed last."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Any] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, runs: list[ViewedRun], p: Parameters) -> dict[str, Any]:
        """What `trew compare` prints as JSON. Raises Refused where these runs cannot be compared."""
        from ..runs.compare import Choices, compare_runs, to_json

        choices = Choices(
            metric=p.text("metric", "final"), baseline=p.text("baseline"), by=tuple(sorted(p.names("by"))),
            allow=_accepted("allow", p), unfinished=_unfinished(p),
        )  # fmt: skip
        key = (tuple((run.id, run.revision) for run in runs), choices)
        # Held while comparing: a second request for the same runs waits and takes the result.
        with self._lock:
            if key not in self._known:
                try:
                    self._known[key] = to_json(compare_runs([run.folder for run in runs], choices))
                except TrewError as error:
                    # A refusal is kept too, and raised at every request.
                    self._known[key] = Refused(str(error))
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            found = self._known[key]
        if isinstance(found, TrewError):
            raise found
        return found


def _unfinished(p: Parameters) -> Any:
    from ..runs.compare import Unfinished

    return p.one_of("unfinished", get_args(Unfinished), "refuse")


def _accepted(name: str, p: Parameters) -> Any:
    from ..runs.compare import Allow

    given, accepted = sorted(p.names(name)), get_args(Allow)
    if unknown := [value for value in given if value not in accepted]:
        raise BadRequest(f"{name}: got {unknown[0][:50]!r}, accepts {', '.join(accepted)}")
    return tuple(given)
