"""Checks for what a run needs of a POSIX system: file locks, process limits, signals, forks."""

from __future__ import annotations

import importlib
import os
import signal


def problem() -> str:
    """Says what this system lacks; empty if it lacks nothing.

    >>> problem()
    ''
    """
    missing = [name for name in ("fcntl", "resource") if not _imports(name)]
    missing += [f"signal.{name}" for name in ("SIGHUP", "SIGUSR1", "SIGVTALRM") if not hasattr(signal, name)]
    missing += [] if hasattr(os, "fork") else ["os.fork"]
    if not missing:
        return ""
    return f"trew needs a POSIX system (Linux or macOS; on Windows, WSL): this Python has no {', '.join(missing)}"


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
