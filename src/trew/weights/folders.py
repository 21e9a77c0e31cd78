"""The folders of published versions: each appears whole or not at all, and the two newest stay."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from ..errors import StorageError
from .places import WeightFolder

HEADERS = 1 << 20
"""Room for what a version's files have besides tensors."""
KEPT = 2
"""Versions that stay: one is in use while the next is written."""


def name_of(version: int) -> str:
    """The name of a version's folder.

    >>> name_of(12)
    '000012'
    """
    return f"{version:06d}"


@contextlib.contextmanager
def new_version(place: WeightFolder, version: int, size: int) -> Iterator[Path]:
    """A folder to write a version of ``size`` bytes into, which is renamed to its number at the end of the block;
    older versions are removed meanwhile. Raises StorageError if it cannot be written; nothing of it stays then."""
    root, name = place.folder, name_of(version)
    # Not a number, so that nobody takes it for a version.
    work = root / f".partial-{name}"
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="trew-old") as threads:
            removed = threads.submit(_remove_old, root)
            # Old versions go while the new one is written, and are waited for only where room is short without that.
            if shutil.disk_usage(root).free < size + HEADERS:
                removed.result()
            _require_room(root, size, version=version)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            yield work
        # In shared memory there is no disk to wait for.
        if place.shared:
            _to_disk(work)
        # rename() does not replace a folder that has files.
        shutil.rmtree(root / name, ignore_errors=True)
        work.rename(root / name)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{root}: weights of version {version}, {_mib(size)}, cannot be written: "
            f"{getattr(error, 'strerror', None) or error}; free some space there, or put out on another disk"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_old(root: Path) -> None:
    # By number: names of versions from 1,000,000 on are longer, and would be the oldest as text.
    versions = sorted((path for path in root.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    # The version that is being written is one of KEPT.
    for path in versions[: -(KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)


def _require_room(root: Path, size: int, *, version: int) -> None:
    free = shutil.disk_usage(root).free
    needed = size + HEADERS
    if free < needed:
        raise StorageError(
            f"{root}: weights of version {version} need {_mib(needed)}, {_mib(free)} are free; free some space there, "
            "or put out on another disk. No server was paused"
        )


def _to_disk(folder: Path) -> None:
    """Other machines must not see a name before the content."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
