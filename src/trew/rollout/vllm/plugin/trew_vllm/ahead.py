"""Verifies an announced version of the weights in a thread, while the server generates.

Imports the standard library only, besides :mod:`trew_vllm.published`.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path

from . import published


class Ahead:
    """The version that a trainer has announced. Only the update itself reports what is wrong with one."""

    def __init__(self) -> None:
        self._asked: tuple[Path, str, str] | None = None
        self._found: Future[published.Version] = Future()

    def begin(self, root: Path, folder: str, manifest_digest: str) -> None:
        """Begins to verify a version, as :func:`.published.read` does; returns at once."""
        asked = (root, folder, manifest_digest)
        if asked == self._asked:
            return
        self._asked, self._found = asked, Future()
        # A daemon: a file system that does not answer must not keep the server from ending.
        threading.Thread(target=_verify, args=(self._found, *asked), name="trew-verify", daemon=True).start()

    def take(self, root: Path, folder: str, manifest_digest: str) -> published.Version:
        """Returns a verified version, once: the announced one if its files have not changed since, otherwise it is
        verified now. Raises Refused as :func:`.published.read` does."""
        asked, found, self._asked = self._asked, self._found, None
        if asked == (root, folder, manifest_digest):
            # What could not be read then may be there now; what it still lacks is told below.
            with contextlib.suppress(Exception):
                version = found.result()
                if published.unchanged(version):
                    return version
        return published.read(root, folder, manifest_digest)


def _verify(found: Future[published.Version], root: Path, folder: str, manifest_digest: str) -> None:
    try:
        found.set_result(published.read(root, folder, manifest_digest))
    except BaseException as error:
        found.set_exception(error)
