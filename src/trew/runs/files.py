"""Writes files so that a crash or a full disk never leaves a half-written one under its final name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import StorageError

ASIDE = ".partial"

PRIVATE = 0o700
"""Permissions of the folders of a run: others cannot enter them, whatever the files in them allow."""


def write_atomic(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    guard: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> None:
    """Lets ``write`` fill a temporary file, fsyncs it, and renames it to ``path``: readers see the old file or the new.

    On an error, removes the temporary file, leaves ``path`` as it was, and raises StorageError, or what ``guard`` turns
    an OSError into (``errors.output_file`` for files outside a run folder). In a run folder only the user can read it.
    """
    aside = path.with_name(f".{path.name}{ASIDE}")
    with (guard or storage)(path):
        try:
            aside.unlink(missing_ok=True)  # a leftover, or a link that somebody planted to redirect the write
            # Outside of run folders the umask decides, as for any file that a command writes.
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if guard else 0o600)
            with open(fd, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            # After the fsync: otherwise a crash could leave the new name with empty contents.
            os.replace(aside, path)
        # An interrupt too must leave no file aside.
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        # The rename is in the folder, and lost with a crash until that is synced.
        sync_folder(path.parent)


def append_synced(path: Path, data: bytes) -> None:
    """Appends all of ``data`` and fsyncs; on an error, restores the file to its previous length and raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(fd).st_size
        try:
            rest = memoryview(data)  # a write may be short
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        except OSError:
            # A partial row would join the next one into a line that is neither.
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def make_private(folder: Path) -> None:
    """Creates a folder that only its owner can open, whatever the umask; an existing one keeps its permissions."""
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:
        if not folder.is_dir() or folder.is_symlink():
            raise
        return
    folder.chmod(PRIVATE)  # mkdir's mode is reduced by the umask, which may take the owner's own bits


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable. Ignores file systems that cannot fsync a folder."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names ``path``, the cause and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}; free or mount the disk, then run the same command "
            "with --resume: everything up to the last checkpoint is intact"
        ) from error
