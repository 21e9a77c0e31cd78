"""Mounts the runtime read-only where an unprivileged user can reach it. For root only.

The sandbox runs as an unprivileged user, whom limits on processes bind, but the interpreter may be in a folder that
only root may enter. The mounts are private to this process and end with it: nothing changes on the host.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .runtime import Runtime

_PLACES = ("/mnt", "/media", "/srv", "/opt", "/tmp")
# CLONE_NEWNS, then the MS_… flags of mount.
_NEWNS, _RDONLY, _NOSUID, _REMOUNT, _BIND, _REC, _PRIVATE = 0x20000, 1, 2, 32, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def build(runtime: Runtime, *, keep: tuple[str, ...]) -> str:
    """Builds a root folder with ``runtime`` at its usual paths and empty /tmp and /dev; raises OSError.

    ``keep`` lists paths that must stay visible, such as bwrap itself.
    """
    # The mount covers what the chosen folder holds, so it must hold nothing that is still needed.
    used = [real for _, real in runtime.mounts] + list(keep)
    place = next((p for p in _PLACES if os.path.isdir(p) and not any(u.startswith(p + "/") for u in used)), None)
    if place is None:
        raise OSError("no folder to mount the runtime in")
    _checked(_libc.unshare(_NEWNS))
    # Private first: shared mounts, the default of systemd, would carry the new ones back to the host.
    _mount(None, "/", None, _REC | _PRIVATE)
    # Opened in the new namespace, before any mount covers them.
    sources = [(path, os.open(real, os.O_PATH | os.O_CLOEXEC)) for path, real in runtime.mounts]
    _mount("tmpfs", place, "tmpfs", _NOSUID, "mode=0755,size=1m")
    root = Path(place)
    for name in ("tmp", "dev"):
        (root / name).mkdir()
    for name in ("null", "urandom"):
        (root / "dev" / name).touch()
    for path, source in sources:
        _bind(source, root / path.lstrip("/"))
    for hidden in runtime.hidden:
        _mount("tmpfs", str(root / hidden.lstrip("/")), "tmpfs", _NOSUID | _RDONLY, "mode=0755,size=4k")
    # Read-only last: mount points had to be created first.
    _mount(None, place, None, _REMOUNT | _RDONLY | _NOSUID)
    return place


def _bind(source: int, target: Path) -> None:
    """Mounts an open file or folder at ``target``, and closes the descriptor."""
    real = f"/proc/self/fd/{source}"
    # A mount point must exist, and be of the kind that is mounted there.
    if os.path.isdir(real):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(real, str(target), None, _BIND)
    os.close(source)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _checked(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def _checked(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
