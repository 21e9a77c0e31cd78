"""Signals: the first ends the run at the next point where nothing is lost, the second ends the process at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

ALWAYS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SAME_S = 0.3
"""Signals within this many seconds of the first are the same request: timeout(1) and some launchers send theirs
to the process and then to its group."""


class Interrupted(KeyboardInterrupt):
    """Something that stopped because it was asked to; exits as a shell expects, with 128 + the signal's number.

    No Exception: code that handles what may go wrong with files, models and other people's functions must not take it
    for one of these.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum


class Interrupts:
    """While open, SIGINT, SIGTERM, SIGHUP and the signals of the names in ``more`` are requests to stop.

    The first is remembered, and met where it costs nothing: at ``stop_if_asked``, anywhere in a block of ``anywhere``,
    or, once ``grace_s`` seconds have passed, anywhere in a block of ``after_grace``. A second one, other than SIGHUP,
    ends the process at once, which is safe too: everything that a run writes is complete or not there. Inside these
    blocks, ``kept_out`` protects what must not be left half done.

    Python runs signal handlers between bytecodes of the main thread, which may be minutes inside one backward pass.
    So the signals are also counted by a thread, through the wake-up descriptor that the interpreter writes to the
    moment a signal arrives.

    A SIGHUP that is ignored already (nohup) stays so. Outside the main thread, where Python allows no handlers, none of
    this does anything.
    """

    def __init__(self, *, more: Sequence[str] = ("SIGUSR1",), grace_s: float = 20.0) -> None:
        self.signals = (*ALWAYS, *(signal.Signals[name] for name in more))
        self.grace_s = grace_s
        self.asked: int = 0  # the signal's number
        self._overdue = False
        self._place = ""  # where the main thread is: "", "anywhere" or "after grace"
        self._message = ""
        self._is_kept_out = False
        self._before: dict[int, Any] = {}
        self._actions: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._wakeup = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes from inside its C handler, where it must never block.
            self._ends = socket.socketpair()
            self._ends[1].setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
            ignored = {s for s in self.signals if s == signal.SIGHUP and signal.getsignal(s) == signal.SIG_IGN}
            self._actions = {s: _action(s) for s in self.signals}
            self._before = {s: signal.signal(s, self._handle) for s in self.signals if s not in ignored}
            threading.Thread(target=self._watch, args=(self._ends[0],), daemon=True, name="trew-signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        # Present only if a first request has started the timer.
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._before.items():
            _restore(signum, handler, self._actions.get(signum))
        # The wake-up descriptor first: a signal in between would write to a closed socket.
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._ends[1].close()  # ends the thread

    # ---- where it may stop

    def stop_if_asked(self, message: str) -> None:
        """Raises Interrupted at a point where the run can stop."""
        if self.asked:
            raise Interrupted(f"interrupted: {message}", self.asked)

    @contextlib.contextmanager
    def anywhere(self, message: str = "") -> Iterator[None]:
        """What is done inside can be done again: a request raises Interrupted wherever it is."""
        with self._at("anywhere", message):
            # Asked before the block: the handler ran at a place where it could not raise.
            if self._is_due:
                self._raise()
            yield

    @contextlib.contextmanager
    def after_grace(self, message: str) -> Iterator[None]:
        """What is done inside can be done again, but is worth some waiting: Interrupted is raised ``grace_s`` seconds
        after the request, wherever it is then."""
        with self._at("after grace", message):
            if self._is_due:
                self._raise()
            yield

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[None]:
        """What is done inside is done to its end, such as a message of two parts that another process waits for: a
        request that would be met there is met behind the block."""
        kept_out, due = self._is_kept_out, self._is_due
        self._is_kept_out = True
        try:
            yield
        finally:
            self._is_kept_out = kept_out
        # One that was met before the block is not met again: the block may be part of the cleaning up.
        if self._is_due and not due:
            self._raise()

    @property
    def _is_due(self) -> bool:
        """Whether there is a request that is met at this place."""
        if self._is_kept_out:
            return False
        return bool(self.asked) if self._place == "anywhere" else bool(self._place) and self._overdue

    @contextlib.contextmanager
    def _at(self, place: str, message: str) -> Iterator[None]:
        before = self._place, self._message
        try:
            # Message before place here, and place before message below: a handler that runs in between never raises
            # with another block's message.
            self._message, self._place = message, place
            yield
        finally:
            self._place, self._message = before

    def _raise(self) -> None:
        raise Interrupted(f"interrupted: {self._message}" if self._message else self._by_name(), self.asked)

    def _by_name(self) -> str:
        return f"interrupted by {signal.Signals(self.asked).name}"

    # ---- handlers, in the main thread

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            # Only the first counts here; a second one is the thread's affair, as the handler may not run for minutes.
            return
        self.asked = signum
        if self._place == "anywhere":
            if self._is_due:
                self._raise()
        elif self.grace_s <= 0:
            self._late(signum, frame)
        else:
            # Kept like the other handlers, so that __exit__ restores it.
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _late(self, signum: int, frame: FrameType | None) -> None:
        self._overdue = True
        if self._is_due:
            self._raise()

    # ---- the thread

    def _watch(self, end: socket.socket) -> None:
        first: float | None = None
        with end:
            # One byte per signal: its number. Empty when the other end has been closed.
            while numbers := end.recv(16):
                for signum in set(self.signals).intersection(numbers):
                    if first is None:
                        first = time.monotonic()
                        # Where the main thread raises at once, its own message follows.
                        if self._place != "anywhere":
                            self._say()
                    # Kernel and shell both send SIGHUP when a terminal is closed, some time apart: nobody asked again.
                    elif time.monotonic() - first >= SAME_S and signal.Signals(signum).name != "SIGHUP":
                        leave(128 + signum)

    def _say(self) -> None:
        after = "after this step" if self.grace_s <= 0 else f"after this step, or in {self.grace_s:g} s without it"
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            print(f"\ntrew: stopping {after}; once more stops now", file=sys.stderr, flush=True)


def _action(signum: int) -> ctypes.Array[ctypes.c_char]:
    """What the system does at a signal: its own record (struct sigaction), which is not looked into. 256 bytes are more
    than it has anywhere."""
    record = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).sigaction(signum, None, record)
    return record


def _restore(signum: int, handler: Any, action: ctypes.Array[ctypes.c_char] | None) -> None:
    """Restores a handler. Of one that was not set by Python, such as faulthandler's, Python only knows that it is none
    of its own (SIG_DFL or None)."""
    if handler is not None:
        signal.signal(signum, handler)
    if action is not None and handler in (None, signal.SIG_DFL):
        ctypes.CDLL(None).sigaction(signum, action, None)


class Stoppable:
    """For programs that go on after Ctrl-C: inside, SIGINT only sets ``asked`` while ``working``, and raises
    KeyboardInterrupt otherwise, and when it comes again before that was looked at."""

    def __init__(self) -> None:
        self.asked = self.is_working = False

    def __enter__(self) -> Stoppable:
        if threading.current_thread() is threading.main_thread():
            # Without the wake-up descriptor, Interrupts does not count: its second signal would end the process.
            # -1 switches the descriptor off.
            self._wakeup = signal.set_wakeup_fd(-1)
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work that looks at ``asked`` now and then."""
        self.asked, self.is_working = False, True
        try:
            yield
        finally:
            self.is_working = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Asked already: what works has not looked at ``asked`` since, so a second Ctrl-C breaks in.
        if self.asked or not self.is_working:
            self.asked = False
            raise KeyboardInterrupt
        self.asked = True


def leave(code: int) -> None:
    """Ends the process at once, the terminal's cursor shown again: progress bars hide it. Children see it by
    themselves."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            print("\x1b[?25h" if stream.isatty() else "", end="", file=stream, flush=True)
    # Without cleanup: sys.exit would run handlers and wait for threads.
    os._exit(code)
