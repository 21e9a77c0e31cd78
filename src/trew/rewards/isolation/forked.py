"""Forks a process that answers messages, and ends it. Imports nothing from trew outside ``isolation``."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from .frames import Channel
from .lifelines import die_with_parent


class Forked:
    """A fork of this process that runs ``work`` with its end of a ``channel``, and exits when that returns.

    ``inherited``: descriptors that the fork closes: a copy of another fork's pipe would keep that open when its process
    is gone. ``parent``: the process whose end closes this end of the channel.
    """

    def __init__(self, work: Callable[[Channel], None], *, inherited: Iterable[int], parent: int | None) -> None:
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        creator = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(creator)  # first of all: it must not outlive its creator, not even a killed one
                for descriptor in (down_write, up_read, *inherited):
                    os.close(descriptor)
                work(Channel(down_read, up_write, parent=creator))
            finally:
                # Whatever `work` raises: a fork must never go on in its creator's code, nor run its exit handlers.
                os._exit(1)
        # Held here too, they would hide the end of the fork.
        os.close(down_read)
        os.close(up_write)
        self.channel = Channel(up_read, down_write, parent=parent)

    def collect(self, *, kill: bool = False) -> int:
        """Reaps the process and returns its wait status; kills it first if asked to. 0 if it was reaped before."""
        if self.pid == 0:  # the number may belong to another process by now
            return 0
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1]

    def end(self) -> None:
        """Kills the process if it still runs, and closes the pipes."""
        self.collect(kill=True)
        self.channel.close()
