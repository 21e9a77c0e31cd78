"""Small file systems of their own for tests: full ones, read-only ones. They need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(*, kilobytes: int) -> Iterator[Path]:
    """A file system of that size; the test is skipped where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    # Not below pytest's folders: a run of tests that is killed leaves it mounted, and later ones could not remove them.
    folder = Path(tempfile.mkdtemp(prefix="trew-test-disk-"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()


def fill(folder: Path, *, leave: int) -> Path:
    """Takes all room of ``folder``'s file system but about ``leave`` bytes; returns the file that does."""
    ballast = folder / "ballast"
    page = 4096
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * page)
        file.truncate(max(file.tell() - -(-leave // page) * page, 0))
    return ballast


def read_only(folder: Path, *, on: bool = True) -> None:
    """Makes the file system at ``folder`` read-only, or writable again."""
    subprocess.run(["mount", "-o", f"remount,{'ro' if on else 'rw'}", str(folder)], check=True)
