"""A small process between a run and the worker of users' functions that leaves no process behind when either ends.

A function may start processes, even in new sessions. The guardian is their subreaper: orphans become its children,
where it finds and kills them, even after kill -9 of the run. It imports nothing of trew outside ``isolation`` and is
forked before the worker imports anything, so it stays small and costs milliseconds. Linux only; elsewhere the worker
watches for the end of the run by itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import NoReturn

from .lifelines import adopt_orphans, die_with_parent

LOOK_SECONDS = 2.0  # between two checks that the run is alive, in case another process holds its end of the pipe
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Stop signals, which cluster managers send to every process. Only the run acts on them: it ends its workers when its
step is done."""


def stand_guard(life: int, *, grace_s: float = 0.0) -> bool:
    """Forks; returns in the child, which continues as the worker. True if it is guarded.

    The guardian never returns. It kills everything once the worker has ended or ``life`` is readable, by a byte or by
    end of file; with ``grace_s``, it sends SIGTERM first and gives them that many seconds to end."""
    if not adopt_orphans():
        return False
    run, guardian = os.getppid(), os.getpid()
    for request in REQUESTS:
        # Set before the fork, so that no signal kills the worker before it has installed its own handlers.
        signal.signal(request, signal.SIG_IGN)
    worker = os.fork()
    if worker:
        _watch(worker, life, run, grace_s)
    os.setsid()  # a signal to the worker's process group must not reach the guardian
    die_with_parent(guardian)
    os.close(life)
    return True


def _watch(worker: int, life: int, run: int, grace_s: float) -> NoReturn:
    """Waits until the run or the worker ends, kills what is left, and exits with the worker's status."""
    status = None
    try:
        _let_go(life)
        # The self-pipe trick: SIGCHLD writes a byte, so that one select waits for the pipe and for children alike.
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up byte is written only for handled signals
        from . import tree  # imported in the guardian only, so that the worker does not wait for it

        while (status := _reaped(worker)) is None and os.getppid() == run:
            ready, _, _ = select.select([life, woken], [], [], LOOK_SECONDS)
            if life in ready:
                break
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        if grace_s:
            ended = _let_end(worker, tree.children(os.getpid()), grace_s)
            status = ended if status is None else status
        tree.end_children()
    finally:
        _exit_like(status)


def _let_end(worker: int, processes: list[int], seconds: float) -> int | None:
    """Asks children to end and waits until all have; returns the wait status of ``worker`` if it was among them."""
    for process in processes:
        os.kill(process, signal.SIGTERM)  # they are unreaped children: the numbers are still theirs
    until, status = time.monotonic() + seconds, None
    while time.monotonic() < until:
        try:
            found, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        status = code if found == worker else status
        if not found:
            time.sleep(0.02)
    return status


def _let_go(life: int) -> None:
    """Closes inherited descriptors: a pipe that the guardian held open would hide the worker's end from the run."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != life:
            with contextlib.suppress(OSError):  # the descriptor that listed them is closed already
                os.close(int(name))
    # The guardian dies by its worker's signal: the worker's core dump is enough.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reaped(worker: int) -> int | None:
    """Reaps every child that has ended; returns the wait status of ``worker`` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                status = found[1]
    return status


def _exit_like(status: int | None) -> NoReturn:
    """Ends this process as ``status`` says, by exit code or signal: the run sees the guardian's status alone."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to restore
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)
