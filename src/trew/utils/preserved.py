"""Restores process-wide state after a user's function ran, so that one reward cannot affect what runs after it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGALRM") if hasattr(signal, name))


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Restores the working folder, the environment, the global random generators of random, numpy and torch (if
    loaded), torch's thread count, and, in the main thread, signal handlers.

    >>> before = random.getstate()
    >>> with preserved_state():
    ...     random.seed(1); os.environ["X_TREW"] = "1"
    >>> random.getstate() == before, "X_TREW" in os.environ
    (True, False)
    """
    folder, environment = os.getcwd(), dict(os.environ)
    python_random, numpy_random = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds, and most rewards do without
    torch_random = (torch.get_rng_state(), torch.get_num_threads()) if torch is not None else None
    # Python allows signal.signal in the main thread only.
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in _SIGNALS} if main else {}
    try:
        yield
    finally:
        if not _is_current(folder):
            os.chdir(folder)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        if torch is not None and torch_random is not None:
            torch.set_rng_state(torch_random[0])
            if torch.get_num_threads() != torch_random[1]:
                torch.set_num_threads(torch_random[1])
        _restore_handlers(handlers)


def _restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        # None is a handler that was not installed from Python, which Python cannot restore.
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _is_current(folder: str) -> bool:
    try:
        return os.getcwd() == folder
    except OSError:  # the function removed the folder that it had changed into
        return False


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Puts ``folder`` at the end of the import path while the block runs."""
    entry = str(folder)
    added = entry not in sys.path
    if added:
        sys.path.append(entry)  # appended, so that a file next to a reward cannot shadow an installed package
    try:
        yield
    finally:
        if added and entry in sys.path:
            sys.path.remove(entry)
