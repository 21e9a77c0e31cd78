"""The process that users' functions live in: what it does with each message of ``process.Process``."""

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

from ...types import Prompt
from ...utils.secrets import redact
from ..builtin import KINDS, graded
from ..isolation.frames import Channel, Closed
from ..isolation.guardian import REQUESTS
from .functions import Sample, UserFunction
from .session import Call, Session
from .wire import decode, encode


def main(source: int, target: int, *, parent: int, life: int | None) -> None:
    """The process's whole life: answers until nobody asks any more. ``life`` is the pipe to the run ``parent`` where
    no guardian has it."""
    if life is not None:
        os.set_inheritable(life, False)
        _end_with_parent(life)
    channel = Channel(source, target, parent=None if life is None else parent)
    _survive_requests()
    sys.stdout = sys.stderr = _Shown(open(2, "wb", buffering=0, closefd=False))  # noqa: SIM115 (for the whole life)
    random.seed(0)  # what functions draw depends on the call alone, not on when the process was started
    np.random.seed(0)
    session, loaded = Session(), list[UserFunction]()
    with contextlib.suppress(Closed):
        while True:
            what, *given = decode(channel.receive()[0])
            channel.send(encode(_ANSWERS[what](session, loaded, *given)))
    os._exit(0)


def _load(session: Session, loaded: list[UserFunction], specs: Any) -> list[Any]:
    [found] = session.load([(spec, args) for spec, args in specs])
    if not isinstance(found, UserFunction):
        return [{"problems": list(found)}]
    loaded.append(found)
    return [{**dataclasses.asdict(found), "file": str(found.file)}]


def _grade(_session: Session, _loaded: list[UserFunction], kind: str, items: Any) -> list[Any]:
    verdicts = [graded(KINDS[kind], text, gold, args) for text, gold, args in items]
    return [(verdict.score, verdict.status) for verdict in verdicts]


def _call(session: Session, loaded: list[UserFunction], prompts: Any, calls: Any, step: int) -> list[Any]:
    rows = [Prompt(uid, text=text, messages=messages, columns=columns) for uid, text, messages, columns in prompts]
    made = [
        Call(loaded[index], [Sample(rows[p], *rest) for p, *rest in samples], limit) for index, samples, limit in calls
    ]
    return [
        {
            "values": outcome.values,
            "faults": [(i, dataclasses.astuple(fault)) for i, fault in outcome.faults.items()],
            "whole": None if outcome.whole is None else dataclasses.astuple(outcome.whole),
            "seconds": outcome.seconds,
            "steps": outcome.steps,
        }
        for outcome in session.call(made, step=step)
    ]


_ANSWERS = {"load": _load, "grade": _grade, "call": _call}


class _Shown(io.TextIOWrapper):
    """What functions print: often a model's text, which must not act on the terminal, and never worth a failure."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(cast(BinaryIO, raw), encoding="utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a terminal that is gone
            super().write("".join(c if c.isprintable() or c in "\n\t\r" else ascii(c)[1:-1] for c in redact(text)))
        return len(text)


def _survive_requests() -> None:
    """Requests to stop are for the run, which still needs this process to finish its step: cluster managers send them
    to every process. What functions start is not protected: ignoring would be inherited, a handler is not, and a copy
    of this process (multiprocessing) does as it is told."""
    own = os.getpid()

    def only_here(signum: int, frame: object) -> None:
        if os.getpid() != own:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in REQUESTS:
        signal.signal(signum, only_here)


def _end_with_parent(life: int) -> None:
    """Ends this process when the other end of the pipe is gone, even while a function never yields to Python: the
    kernel sends a signal that ends it. Where it does not (macOS), a thread watches."""
    with contextlib.suppress(AttributeError, OSError):
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(life, 1)  # never written to: returns when it is closed
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="trew-parent").start()
