"""Runs another program under a guardian: all of its processes end when this one does, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .worker import BOOT

_KILL_S = 5.0  # that the guardian needs at most to kill what did not end by itself


class GuardedProgram:
    """A started program. ``output`` receives what it prints; ``grace_s`` are the seconds that it may take to end by
    itself, before its processes are killed. Linux only: elsewhere it would not be sure to end with this process."""

    def __init__(
        self, command: Sequence[str], *, output: BinaryIO, folder: Path, environment: Mapping[str, str], grace_s: float
    ) -> None:
        theirs, self._life = os.pipe()
        start = {
            "module": "trew_worker.isolation.command", "arguments": {"command": list(command)}, "parent": os.getpid(),
            "life": theirs, "path": None, "grace_s": grace_s,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(BOOT), json.dumps(start)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, cwd=folder, pass_fds=[theirs],
            start_new_session=True, env=dict(environment),
        )  # fmt: skip
        # The guardian's end: held here too, it would let a write to an ended guardian succeed.
        os.close(theirs)
        # Also runs when the interpreter exits. Must not hold a reference to self.
        self._end: weakref.finalize[..., Any] = weakref.finalize(
            self, _end, self._process, self._life, os.getpid(), grace_s
        )

    @property
    def pid(self) -> int:
        """The guardian's process; the program is its child."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, once it has ended; None before."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Lets it clean up and end by itself; :meth:`end` is to follow."""
        if self._end.alive:
            with contextlib.suppress(BrokenPipeError):  # its guardian has ended
                os.write(self._life, b"x")

    def end(self) -> None:
        """Ends it with all its processes: asks first, and kills what is left after the grace."""
        self._end()


def how_it_ended(status: int) -> str:
    """An exit status in words.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exit code 3', 'killed by SIGKILL')
    """
    if status >= 0:
        return f"exit code {status}"
    return f"killed by {signal.Signals(-status).name if -status in set(signal.Signals) else -status}"


def _end(process: subprocess.Popen[bytes], life: int, owner: int, grace_s: float) -> None:
    """Ends a program: ``process`` is its guardian, ``life`` the pipe that the guardian watches, ``owner`` the process
    that started it. A fork of the owner only gives up its end of the pipe."""
    os.close(life)
    if os.getpid() != owner:
        return
    try:
        process.wait(grace_s + _KILL_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
