"""Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second ends it at once."""

from __future__ import annotations

import os
import signal
import socket
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
    """While open, remembers the first SIGINT, SIGTERM or SIGUSR1; the second one ends the process at once.

    Python runs signal handlers between bytecodes of the main thread, which may be minutes inside one backward pass.
    So the signals are also counted by a thread, through the wake-up descriptor that the interpreter writes to the
    moment a signal arrives. Leaving at once is safe: everything that a run writes is complete or not there.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked: int = 0  # the signal's number
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._ends = socket.socketpair()
            self._ends[1].setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
            self._before = {s: signal.signal(s, self._handle) for s in self.SIGNALS}
            threading.Thread(target=self._watch, args=(self._ends[0],), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._ends[1].close()  # ends the thread

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signum

    def _watch(self, end: socket.socket) -> None:
        count = 0
        with end:
            while numbers := end.recv(16):
                for signum in numbers:
                    if signum not in self.SIGNALS:
                        continue
                    count += 1
                    if count == 1:
                        print("\ntrew: stopping after this step; once more stops now", file=sys.stderr, flush=True)
                        continue
                    if sys.stderr.isatty():
                        print("\x1b[?25h", end="", file=sys.stderr, flush=True)  # progress bars hide the cursor
                    os._exit(128 + signum)

    def stop_if_asked(self, message: str) -> None:
        """Raises Interrupted at a point where the run can stop."""
        if self.asked:
            raise Interrupted(f"interrupted: {message}", self.asked)
