"""What asynchronous rollouts leave in the run folder, so that nothing is lost with the process:

ledger.jsonl   one line per entry of the :class:`~trew.rollout.ledger.Ledger`
pending/       finished groups that no checkpoint covers yet; several of them in one file
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..rollout.ledger import Stored
from .files import append_synced, make_private, storage, sync_folder


class Journal:
    """The ledger's file and the groups of an open run folder, for one thread at a time.

    Lines are on the disk after :meth:`flush`, groups after :meth:`put`: both are written and synced for many at once.
    Every write either completes or raises StorageError.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.folder = folder / "ledger.jsonl", folder / "pending"
        self._lines: list[str] = []  # that are not in the file yet
        with storage(self.folder):
            make_private(self.folder)
            self._files = {path.name for path in self.folder.iterdir()}
        # Numbers go on behind what is there: a name must never mean two files.
        self._next = 1 + max((int(name) for name in self._files if name.isdecimal()), default=0)

    def lines(self) -> list[bytes]:
        """The lines of the file. A last one that was only begun, when a process was killed, is removed from it."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        # rfind gives -1 if there is no newline, and so nothing.
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with storage(self.path):
                os.truncate(self.path, len(whole))
        return whole.splitlines()

    def write(self, line: str) -> None:
        """Adds a line to those that :meth:`flush` writes."""
        self._lines.append(line)

    def flush(self) -> None:
        """Appends all lines, and has them on the disk when it returns."""
        if self._lines:
            with storage(self.path):
                # One write and one sync for all lines.
                append_synced(self.path, "".join(f"{line}\n" for line in self._lines).encode())
            self._lines = []

    def put(self, groups: Sequence[bytes]) -> list[Stored]:
        """Stores groups in one new file, and has it on the disk when it returns."""
        path = self.folder / f"{self._next:06d}"
        self._next += 1
        with storage(path):
            append_synced(path, b"".join(groups))
            # The file's entry in the folder, too.
            sync_folder(self.folder)
        self._files.add(path.name)
        found, at = [], 0
        for data in groups:
            found.append(Stored(path.name, at, len(data), hashlib.sha256(data).hexdigest()))
            at += len(data)
        return found

    def get(self, stored: Stored) -> bytes:
        """A stored group. Raises CheckpointError if it is gone, or not what was stored."""
        path = self.folder / stored.file
        try:
            with path.open("rb") as file:
                file.seek(stored.at)
                data = file.read(stored.size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise CheckpointError(f"{path}: is damaged: {stored.size} bytes from {stored.at} on have another SHA-256")
        return data

    def keep(self, needed: Collection[str]) -> None:
        """Removes all files of groups but these."""
        for name in self._files.difference(needed):
            with storage(self.folder):
                (self.folder / name).unlink(missing_ok=True)
            self._files.discard(name)
