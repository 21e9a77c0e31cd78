"""Tells the lock of a run from a copy of it: a folder that is copied while its run trains names the same process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..runs.layout import LOCK


def is_copy(lock: Path, content: bytes, found: os.stat_result) -> bool:
    """Whether the live process that the ``content`` of a lock names has locks open, and this one is none of them.

    False where nothing is known: of another user's process, on systems without /proc, and where the file system has no
    locks, so that the run keeps none open.
    """
    try:
        folder = f"/proc/{int(json.loads(content)['pid'])}/fd"
        opened = {at: name for at in os.listdir(folder) if (name := _name(f"{folder}/{at}")) is not None}
        # A folder that was moved keeps its file; where inodes are made up anew, as by FUSE, its name says that.
        # Not the device: two mounts of one server have two.
        return bool(opened) and not any(
            name == os.path.realpath(lock) or os.stat(f"{folder}/{at}").st_ino == found.st_ino
            for at, name in opened.items()
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _name(descriptor: str) -> str | None:
    """The path of the open lock behind a descriptor; None if it is something else, or was closed meanwhile."""
    try:
        name = os.readlink(descriptor)
    except FileNotFoundError:
        return None
    return name if Path(name.removesuffix(" (deleted)")).name == LOCK else None
