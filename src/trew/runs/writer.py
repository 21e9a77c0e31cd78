"""Writes checkpoints in a background thread while the run continues, until it changes the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, LostRankError, TrewError
from . import checkpoint_files

Write = Callable[[Callable[[], None], Callable[[], bool]], str | None]
"""Writes a checkpoint or a part of one: calls the first argument when tensors may change, gives up waiting for other
ranks when the second returns True, and may return a line for the user."""


class Writer:
    """Writes one checkpoint at a time; calls ``notify`` with a line about each.

    The thread reads the tensors in place, without a copy, so that it needs no memory of their size. They do not change
    while completions are generated and scored; call :meth:`release` before changing them. The next call of any method
    raises the CheckpointError of a failed write.
    """

    def __init__(self, notify: Callable[[str], None] = lambda line: None, *, background: bool = True) -> None:
        self._notify, self._background = notify, background
        self._thread: threading.Thread | None = None
        self._read, self._abandoned = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._done = ""  # the line about the finished checkpoint, until ``notify`` gets it
        self._held = 0.0  # seconds that the run has waited for the current checkpoint

    def save(
        self, root: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *,
        failed: Callable[[], None] = lambda: None, **how: Any,
    ) -> None:  # fmt: skip
        """Starts a checkpoint once the previous one is complete; takes the arguments of :func:`.checkpoint_files.save`.

        ``meta`` must not change afterwards. ``failed`` is called where it could not be written.
        """

        def write(read: Callable[[], None], abandoned: Callable[[], bool]) -> str:
            start = time.monotonic()
            try:
                folder = checkpoint_files.save(root, step, tensors, meta, **how, read=read, abandoned=abandoned)
            except BaseException:
                failed()
                raise
            seconds = time.monotonic() - start
            return f"checkpoint of step {step}: {checkpoint_files.size(folder) / 1e6:,.1f} MB in {seconds:.2f} s"

        self.run(write, f"{root}: the checkpoint of step {step}")

    def run(self, write: Write, what: str = "a part of a checkpoint") -> None:
        """Starts ``write`` once the previous one is complete; ``what`` names it in errors."""
        self.finish()
        # A new event for each checkpoint: the previous one is set already.
        self._read, self._held = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._write, args=(write, what), name="trew-checkpoint", daemon=True)
        self._thread.start()
        if not self._background:
            self.finish()

    def release(self) -> None:
        """Waits until the tensors may change: the thread has read them."""
        if self._thread is not None:
            start = time.monotonic()
            # Not join(): hashing and syncing may go on while the weights change.
            self._read.wait()
            self._held += time.monotonic() - start
        # The write may have ended in the meantime: report it now, not at the next checkpoint.
        if self._done or self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Waits until the current checkpoint is complete."""
        if self._thread is not None:
            start = time.monotonic()
            self._thread.join()
            self._held += time.monotonic() - start
            self._thread = None
        if self._done:
            self._notify(f"{self._done}; the run waited {self._held:.2f} s for it")
            self._done = ""
        if self._error is not None:
            # Raised once: the next call starts afresh.
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Completes the current checkpoint, whatever ends the run, except that nobody waits for a rank that died."""
        if kind is not None and issubclass(kind, LostRankError):
            # The write in progress stops waiting for that rank's part.
            self._abandoned.set()
        try:
            self.finish()
        except TrewError as error:
            if kind is None:
                raise
            self._notify(str(error))  # another error is ending the run and must not be replaced

    def _write(self, write: Write, what: str) -> None:
        try:
            self._done = write(self._read.set, self._abandoned.is_set) or ""
        except TrewError as error:
            self._error = error
        # Kept for the main thread: an exception in a thread would only be printed.
        except BaseException as error:
            self._error = CheckpointError(f"{what} could not be written: {error!r}")
        finally:
            # Also after an error before the tensors were read: ``release`` would wait for ever.
            self._read.set()
