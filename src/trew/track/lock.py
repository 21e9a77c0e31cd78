"""One run per folder: an advisory lock that the kernel drops when its process dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from ..errors import ConfigError

_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """Holds ``run.lock``, which says who (pid and host) for the message of the second comer.

    The lock itself is flock: it needs no clock and no cleaning up after kill -9. On a file system without flock the
    content decides: a live process of this host, or any process of another host, is taken at its word.
    """

    def __init__(self, path: Path):
        """Takes the lock, or raises ConfigError naming the holder. ``stale`` describes a holder that died."""
        self.path = path
        self.stale: str | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self)

    def _take(self) -> None:
        holder = _read(self._fd)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(self._refusal(holder)) from None
        except OSError:  # no flock here: ENOLCK, ENOTSUP
            if holder and (holder.get("host") != socket.gethostname() or _alive(holder.get("pid"))):
                raise ConfigError(self._refusal(holder)) from None
        if holder:
            self.stale = f"took over the lock of a run that ended without closing it ({_who(holder)})"
        _write(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def _refusal(self, holder: dict) -> str:
        return (
            f"out: {self.path.parent} is in use by another run ({_who(holder)}); wait for it, stop it, "
            f"or choose another folder. If that run is certainly over, delete {self.path}"
        )

    def release(self) -> None:
        """Gives the folder free; the file stays, empty (removing it would let two newcomers lock two files)."""
        if self._fd < 0:
            return
        _write(self._fd, "")
        self._drop()

    def _drop(self) -> None:
        os.close(self._fd)
        self._fd = -1
        _held.discard(self)


def _forget_in_child() -> None:
    """A forked helper must not keep its parent's lock alive after the parent was killed."""
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_forget_in_child)


def _read(fd: int) -> dict:
    try:
        holder = json.loads(os.pread(fd, 4096, 0) or b"{}")
    except ValueError:
        return {"pid": "unknown", "host": "unknown"}
    return holder if isinstance(holder, dict) else {}


def _write(fd: int, text: str) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, only its message is poorer


def _who(holder: dict) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')}"


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
