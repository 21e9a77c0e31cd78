"""Runs another program in place of a worker: what it starts ends with the run, as :mod:`.guardian` describes."""

from __future__ import annotations

import os
import signal

from .guardian import REQUESTS


def main(reads: int, writes: int, *, parent: int, command: list[str], life: int | None) -> None:
    """Becomes ``command``, a program's path and its arguments, in this process's folder and environment.

    Its standard input is empty, and both outputs go to this process's standard error. Without a guardian (``life`` is
    the pipe that nobody watches) it is not started: it could outlive the run."""
    # Under a guardian the parent is the guardian, and not the run.
    if life is not None or os.getppid() == parent:
        raise SystemExit("programs are started only under a guardian, which needs Linux")
    os.close(reads)
    os.close(writes)
    for request in REQUESTS:  # ignored signals stay ignored in a new program, which would never hear a request to end
        signal.signal(request, signal.SIG_DFL)
    os.execv(command[0], command)
