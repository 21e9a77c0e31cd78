"""Brings a server that died back, in a thread of its own, while the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...errors import MissingResources
from .endpoint import Endpoint
from .update import Published, update

Restart = Callable[[], Endpoint | None]


class Revival:
    """A server on its way back: restarted, brought to the newest weights, proven by their canary. Begins at once.

    ``restart`` returns when the server answers: where it listens now, None for where it did before; or raises.
    ``newest`` returns the weights that it should have, which may change while they are loaded. Where this is
    :attr:`over`, ``published`` are the weights that it has at ``endpoint``, or ``error`` says why it has none;
    ``missing``: because a cluster has no place for it.
    """

    def __init__(
        self, endpoint: Endpoint, *, restart: Restart, newest: Callable[[], Published], timeout_s: float
    ) -> None:
        self.published: Published | None = None
        self.gap = 0.0  # mean difference of the canary in nats
        self.error = ""
        self.missing = False
        self.endpoint = endpoint
        self._restart, self._newest, self._timeout_s = restart, newest, timeout_s
        # A daemon: a run that ends stops the server that it waits for, and must not wait for this thread before.
        self._thread = threading.Thread(target=self._run, name="trew-revival", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has succeeded or failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Returns once it is over, or after so many seconds."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.endpoint = self._restart() or self.endpoint
            # Other weights may have been published while these were loaded.
            while self.published is not (newest := self._newest()):
                self.gap = update(self.endpoint, newest, timeout_s=self._timeout_s).gap
                self.published = newest
        except Exception as error:  # whatever it is, whoever waits for this server must see it
            self.error, self.missing = str(error) or type(error).__name__, isinstance(error, MissingResources)
