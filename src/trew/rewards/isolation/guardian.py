"""The small process between a run and the process of users' functions: when either is gone, nothing stays behind.

A function may start processes, with sessions of their own as well. The guardian is their reaper: whatever loses its
parent becomes the guardian's child (PR_SET_CHILD_SUBREAPER), where it can be found and ended, also after kill -9 of the
run. It imports nothing of trew and is forked before the functions' process imports anything, so it is small and costs
milliseconds. Linux only; elsewhere the functions' process looks after itself alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 2.0  # between two looks for the run, should something else hold the pipe that it left
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Requests to stop, which cluster managers send to every process: they are for the run, which ends its workers when it
is done."""


def stand_guard(life: int) -> bool:
    """Forks. Returns in the child, which goes on as the functions' process: True where it is guarded. The guardian
    itself never returns; it ends everything when the pipe ``life`` has something to read, a byte or its end."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return False
    run, guardian = os.getppid(), os.getpid()
    for request in REQUESTS:
        signal.signal(request, signal.SIG_IGN)  # they are for the run; the functions' process has handlers soon
    worker = os.fork()
    if worker:
        _watch(worker, life, run)
    os.setsid()  # a signal to the group of the functions' process does not reach its guardian
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guardian:
        os._exit(1)
    os.close(life)
    return True


def _watch(worker: int, life: int, run: int) -> NoReturn:
    """Waits for the end of the run or of the functions' process, ends what is left, and exits as that process did."""
    status = None
    try:
        _let_go(life)
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up is written
        from . import tree  # here, in the guardian alone: the worker need not wait for it

        while (status := _reaped(worker)) is None and os.getppid() == run:
            ready, _, _ = select.select([life, woken], [], [], LOOK_SECONDS)
            if life in ready:
                break
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        tree.end_children()
    finally:
        _exit_like(status)


def _let_go(life: int) -> None:
    """Closes what was inherited, so that no pipe stays open because of the guardian."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != life:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it dies of its worker's signal; one core is enough


def _reaped(worker: int) -> int | None:
    """Collects every child that has ended; the wait status of ``worker`` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                status = found[1]
    return status


def _exit_like(status: int | None) -> NoReturn:
    """Ends this process with the exit code or by the signal of ``status``."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to put back
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)
