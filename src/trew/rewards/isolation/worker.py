"""One worker process, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .frames import Channel

BOOT = Path(__file__).with_name("boot.py")
START_S = 120.0  # for an interpreter and its imports on a loaded machine
HANGUP_S = 0.5  # between the end of its pipe, at which an idle worker ends by itself, and its kill
GUARDED_S = 10.0  # for a guardian to end everything; it takes milliseconds
DEATH_S = 0.2  # for a process whose pipe has closed to be gone, so that it can be told how it ended


class Worker:
    """A started process that runs ``module.main``, and the channel to it. Not for two threads at once.

    ``guarded``: a guardian stands between this process and the worker, and ends whatever the worker started with it.
    Everything else is ended by group. ``path`` is the worker's ``sys.path``, its own where none is given. Ctrl-C at a
    terminal does not reach it: that is for the run, which finishes its step.
    """

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        *,
        flags: Sequence[str] = ("-P",),
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        path: Sequence[str] | None = None,
        stderr: int | None = subprocess.DEVNULL,
        guarded: bool = False,
    ):
        theirs, self._life = os.pipe() if guarded else (None, None)
        start = {
            "module": module,
            "arguments": dict(arguments),
            "parent": os.getpid(),
            "life": theirs,
            "path": None if path is None else list(path),
        }
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(BOOT), json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            pass_fds=[] if theirs is None else [theirs],
            start_new_session=True,
            bufsize=0,
        )
        if theirs is not None:
            os.close(theirs)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno())
        self._finalizer = weakref.finalize(self, _end, self.process, self._life)

    def ask(self, *parts: bytes, limit: float | None = None) -> list[bytes]:
        """The answer to a message; raises Closed, or Late after ``limit`` seconds. Either way nothing more can be
        asked: the next answer might be to this message."""
        deadline = None if limit is None else time.monotonic() + limit
        self.channel.send(*parts, deadline=deadline)
        return self.channel.receive(deadline=deadline)

    def kill(self) -> None:
        """Has it ended at once, whatever it does; any thread may call this. ``end`` waits for it."""
        if self._finalizer.alive:
            _kill(self.process, self._life)

    def end(self) -> None:
        """Hangs up, waits for the process, and kills it where it does not go by itself."""
        self._finalizer()

    def how_it_ended(self) -> str:
        """How a process whose pipe has closed ended, in words."""
        until, ended = time.monotonic() + DEATH_S, None
        # Looked at but not collected, so that its number cannot become that of another process group before the kill.
        while ended is None and time.monotonic() < until:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(0.002)
        if ended is None:
            return "its process was ended"
        if ended.si_code == os.CLD_EXITED:
            return f"its process exited with code {ended.si_status}"
        number = ended.si_status
        name = signal.Signals(number).name if number in set(signal.Signals) else ""
        return f"its process was ended by signal {number} {name}".rstrip()

    def forget(self) -> None:
        """After a fork, in the child: the process is the parent's. Pipes are closed here, so that they end with it."""
        if self._finalizer.detach() is None:  # it was being ended by a thread that is not there any more
            return
        _hang_up(self.process)
        if self._life is not None:
            os.close(self._life)
        self.process.returncode = 0  # or Popen would wait for a process that is no child of this one


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _kill(process: subprocess.Popen[bytes], life: int | None) -> None:
    if life is not None and sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is gone already
            os.write(life, b"x")
    else:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not collected, so that its number is still its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], life: int | None) -> None:
    _hang_up(process)
    if life is not None:
        _kill(process, life)
    try:
        process.wait(HANGUP_S if life is None else GUARDED_S)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.wait()
    if life is not None:
        os.close(life)
