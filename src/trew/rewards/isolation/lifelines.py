"""Ties processes to each other by Linux's means: a child that dies with its parent, orphans that are adopted.

Imports nothing of trew: workers, their guardian and the sandbox's child use it before anything else is imported.
Elsewhere than on Linux both do nothing; there the processes watch their pipes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded with the module and not when it is needed: a child that was just forked must not load libraries.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when its parent ends; with the parent's pid, also if it has ended already.

    A change of the user clears this, as does executing a set-user-id program. Raises OSError if the kernel refuses.
    """
    if _libc is not None and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_PDEATHSIG: {os.strerror(number)}")
    # If the parent died before the call, the signal never comes: check once more.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> bool:
    """Makes this process the parent of all its descendants' orphans, so that it can find them; False if it cannot."""
    return _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
