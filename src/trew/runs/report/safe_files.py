"""Reads a run folder that somebody else may have prepared: only regular files of bounded size, and no links.

The folder itself may be a link, because the user named it; nothing below it may. Opens every name relative to the
descriptor of its folder, so that a folder cannot be swapped for a link between a check and its use.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MIB = 2**20
TEXT_BYTES = 16 * MIB
"""The largest size of config.toml or summary.json in bytes."""
METRICS_BYTES = 512 * MIB
TABLE_BYTES = 4096 * MIB
"""The largest size of one parquet file of rollouts or evaluations in bytes."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UnsafeFile(OSError):
    """A name in a run folder that must not be read: a link, a device, a FIFO, a folder, or a file that is too large."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(errno.EINVAL, why, name)


def open_file(folder: Path, name: str, *, most: int) -> BinaryIO:
    """Opens the regular file ``name`` (parts separated by /) below ``folder``, of at most ``most`` bytes.

    Raises UnsafeFile for files that must not be read, and OSError for files that cannot be.
    """
    *folders, last = name.split("/")
    if any(part in ("", ".", "..") for part in (*folders, last)):
        raise UnsafeFile(name, "is not a plain name below the run folder; not read")
    inside = _open_folder(folder, folders)
    try:
        descriptor = _open_at(last, _FILE, inside, name)
    finally:
        os.close(inside)
    try:
        # Of the descriptor, not the path: the path may name something else by now.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFile(name, "is not a regular file; not read")
        if found.st_size > most:
            raise UnsafeFile(name, f"has {found.st_size:,} bytes, accepts at most {most:,}; not read")
        # The file object owns the descriptor from here on.
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(folder: Path, name: str, *, most: int = TEXT_BYTES) -> str:
    """The text of a file opened as by :func:`open_file`; bytes that are not UTF-8 become U+FFFD."""
    with open_file(folder, name, most=most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it grew after its size was checked
        raise UnsafeFile(name, f"accepts at most {most:,} bytes; not read")
    return data.decode("utf-8", errors="replace")


def file_names(folder: Path, name: str) -> list[str]:
    """The names in the folder ``name`` below ``folder``; none if it does not exist. Refuses a link."""
    try:
        inside = _open_folder(folder, [name])
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(os.listdir(inside))
    finally:
        os.close(inside)


def exists(folder: Path, name: str) -> bool:
    """Whether ``folder`` has an entry called ``name``, even if it is a dangling link."""
    return os.path.lexists(folder / name)


def _open_folder(folder: Path, below: list[str]) -> int:
    descriptor = os.open(folder, _FOLDER)
    for part in below:
        try:
            # Relative to the folder before: no part of the path is looked up twice, so none can be swapped in between.
            inner = _open_at(part, _FOLDER | os.O_NOFOLLOW, descriptor, part)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _open_at(name: str, flags: int, folder: int, shown: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        # ELOOP: the last part is a link. With O_DIRECTORY, Linux reports a link as ENOTDIR.
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(name, folder)):
            raise UnsafeFile(shown, "is a link; links in a run folder are not followed") from None
        if error.errno == errno.ENXIO:  # a socket
            raise UnsafeFile(shown, "is not a regular file; not read") from None
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
