"""Whether a file or a folder has changed."""

from __future__ import annotations

import os
from pathlib import Path

Signature = tuple[int, int, int]
"""Inode, size, and the time of the last change in nanoseconds."""


def signature(path: Path) -> Signature | None:
    """Of the file itself, not of what a link points to; None if it is missing."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
