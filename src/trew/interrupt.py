"""Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from .errors import TrewError


class Interrupted(TrewError):
    """A run that stopped because it was asked to; exits as a shell expects, with 128 + the signal's number."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum


class Interrupts:
    """While open, remembers the first SIGINT, SIGTERM or SIGUSR1; the second one raises KeyboardInterrupt at once.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked: int = 0  # the signal's number
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signum
        print("\ntrew: stopping after this step; once more stops now", file=sys.stderr)

    def stop_if_asked(self, message: str) -> None:
        """Raises Interrupted at a point where the run can stop."""
        if self.asked:
            raise Interrupted(f"interrupted: {message}", self.asked)
