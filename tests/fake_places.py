"""The queue of a stand-in server, as vLLM's with --scheduling-policy priority."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any


class Places:
    """Requests beyond ``slots`` wait for a place: lower priorities have one first, then earlier requests."""

    def __init__(self) -> None:
        self.slots, self._busy = 64, 0
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def of(self, do: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same, in a place."""

        def waits(body: Any) -> Any:
            with self._changed:
                own = (body.get("priority", 0), next(self._numbers))
                self._queue.append(own)
                self._changed.wait_for(lambda: self._busy < self.slots and min(self._queue) == own)
                self._queue.remove(own)
                self._busy += 1
                self._changed.notify_all()
            try:
                return do(body)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

        return waits
