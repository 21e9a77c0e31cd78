"""Starts, asks and ends one worker process."""

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
HANGUP_S = 0.5  # between closing a worker's pipe, at which an idle one exits by itself, and its kill
GUARDED_S = 10.0  # for a guardian to end everything; it normally takes milliseconds
DEATH_S = 0.2  # for a process whose pipe has closed to exit, so that its status can be read


class Worker:
    """A started process that runs ``module.main``, with its channel. Not for two threads at once.

    With ``guarded``, a guardian stands between this process and the worker, and also ends whatever the worker started.
    An unguarded worker is ended by process group. ``path`` replaces the worker's ``sys.path``. Ctrl-C at a terminal
    does not reach the worker: the run handles it and finishes its step.
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
            # Python itself ignores entries that are not text.
            "path": None if path is None else [entry for entry in path if isinstance(entry, str)],
        }
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(BOOT), json.dumps(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            pass_fds=[] if theirs is None else [theirs],
            start_new_session=True,  # outside the terminal's foreground group, and a group that can be killed whole
            bufsize=0,
        )
        # Only this process may hold the other end: the guardian acts when the pipe closes.
        if theirs is not None:
            os.close(theirs)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno())
        # finalize also runs at interpreter exit, so that no worker outlives the run. It must not hold a reference to
        # self, or this object would never be collected.
        self._finalizer = weakref.finalize(self, _end, self.process, self._life)

    def ask(self, *parts: bytes, limit: float | None = None) -> list[bytes]:
        """Sends a message and returns the answer; raises Closed, or Late after ``limit`` seconds.

        After either, the worker must not be asked again: the next answer could belong to this message."""
        deadline = None if limit is None else time.monotonic() + limit
        self.channel.send(*parts, deadline=deadline)
        return self.channel.receive(deadline=deadline)

    def kill(self) -> None:
        """Kills the process without waiting; ``end`` waits. Safe to call from any thread."""
        if self._finalizer.alive:
            _kill(self.process, self._life)

    def end(self) -> None:
        """Closes the pipes, waits for the process, and kills it if it does not exit by itself."""
        self._finalizer()

    def how_it_ended(self) -> str:
        """Describes how a process whose pipe has closed ended."""
        until, ended = time.monotonic() + DEATH_S, None
        # WNOWAIT leaves the process unreaped, so that its number cannot be reused before the kill of its group.
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
        """Gives up the process in a forked child: it belongs to the parent. Closes the child's copies of the pipes."""
        if self._finalizer.detach() is None:  # a thread that does not exist after the fork was ending it
            return
        _hang_up(self.process)
        if self._life is not None:
            os.close(self._life)
        self.process.returncode = 0  # otherwise Popen would wait for a process that is not this one's child


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _kill(process: subprocess.Popen[bytes], life: int | None) -> None:
    # One byte tells the guardian to end the whole tree. Killing the guardian itself would leave orphans behind.
    if life is not None and sys.platform == "linux":
        with contextlib.suppress(OSError):  # the guardian is gone already
            os.write(life, b"x")
    else:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # unreaped, so the number still belongs to this process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], life: int | None) -> None:
    # Hanging up lets an idle worker exit by itself. A guarded one is killed at once, because a user's function may have
    # started processes that keep running.
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
