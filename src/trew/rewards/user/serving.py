"""Main loop of the process that users' functions run in: answers the messages of ``process.Process``."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
import random
import signal
import sys
import threading
from typing import Any, BinaryIO, cast

import numpy as np

from ...utils.secrets import redact
from ..isolation.frames import Channel, Closed
from ..isolation.guardian import REQUESTS
from .functions import UserFunction
from .packing import packed_outcomes, unpacked_calls
from .session import Session
from .wire import decode, encode


def main(source: int, target: int, *, parent: int, life: int | None) -> None:
    """Answers messages until the channel closes. ``life`` is the pipe to the run ``parent`` if no guardian holds it."""
    channel = channel_of_life(source, target, parent=parent, life=life)
    # Seeded, and restored after every call (preserved_state): what functions draw depends on the call alone, not on
    # when the process was started.
    random.seed(0)
    np.random.seed(0)
    session, loaded = Session(), list[UserFunction]()
    with contextlib.suppress(Closed):
        while True:
            what, *given = decode(channel.receive()[0])
            channel.send(encode(_ANSWERS[what](session, loaded, *given)))
    os._exit(0)  # not sys.exit, which would wait for threads that functions have started


def _load(session: Session, loaded: list[UserFunction], specs: Any) -> list[Any]:
    [found] = session.load([(spec, args) for spec, args in specs])
    if not isinstance(found, UserFunction):
        return [{"problems": list(found)}]
    loaded.append(found)
    return [{**dataclasses.asdict(found), "file": str(found.file)}]


def _grade(_session: Session, _loaded: list[UserFunction], kind: str, items: Any) -> list[Any]:
    # Imported when asked for: most processes have functions of their own alone, and the graders take a while to import.
    from ..builtin.kinds import KINDS, graded

    verdicts = [graded(KINDS[kind], text, gold, args) for text, gold, args in items]
    return [(verdict.score, verdict.status) for verdict in verdicts]


def _call(session: Session, loaded: list[UserFunction], prompts: Any, calls: Any, step: int) -> list[Any]:
    made = unpacked_calls(dict(enumerate(loaded)), prompts, calls)
    return packed_outcomes(session.call(made, step=step))


_ANSWERS = {"load": _load, "grade": _grade, "call": _call}


def channel_of_life(source: int, target: int, *, parent: int, life: int | None) -> Channel:
    """The channel of a process that serves until the run ``parent`` ends: from here on it ends with the run, outlives
    requests to stop, and what it prints is escaped."""
    if life is not None:
        os.set_inheritable(life, False)
        end_with_parent(life)
    survive_requests()
    sys.stdout = sys.stderr = EscapedOutput(open(2, "wb", buffering=0, closefd=False))  # noqa: SIM115 (for the whole life)
    # A guarded process has the guardian for its parent, and ends with it; only an unguarded one compares parents.
    return Channel(source, target, parent=None if life is None else parent)


class EscapedOutput(io.TextIOWrapper):
    """Standard output of functions. They often print a model's text, so control characters are escaped and secrets
    redacted; a failed write is ignored."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(cast(BinaryIO, raw), encoding="utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # the terminal is gone
            super().write("".join(c if c.isprintable() or c in "\n\t\r" else ascii(c)[1:-1] for c in redact(text)))
        return len(text)


def survive_requests() -> None:
    """Ignores stop signals in this process: cluster managers send them to every process, and the run needs this one to
    finish its step. A handler instead of SIG_IGN, because exec resets handlers, so that what functions start still
    obeys the signals. A fork of this process (multiprocessing) obeys them too."""
    own = os.getpid()

    def only_here(signum: int, frame: object) -> None:
        if os.getpid() != own:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in REQUESTS:
        signal.signal(signum, only_here)


def end_with_parent(life: int) -> None:
    """Ends this process when the other end of the pipe closes. The kernel then sends SIGIO, whose default action kills
    even while C code holds the interpreter. A thread watches as well, for systems without that signal (macOS)."""
    with contextlib.suppress(AttributeError, OSError):
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(life, 1)  # never written to: returns when it is closed
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="trew-parent").start()
