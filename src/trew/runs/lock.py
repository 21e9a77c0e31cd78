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

    The lock itself is flock: it needs no clock and no cleaning up after kill -9. On a file system without flock, or
    where it is not seen by other hosts, the content decides too: a live process of this host, or any process of another
    host, is taken at its word.
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
            decisive = False
        else:
            decisive = not _of_this_host_only(self.path)
        if holder and not decisive and (holder.get("host") != socket.gethostname() or _alive(holder)):
            raise ConfigError(self._refusal(holder))
        if holder:
            self.stale = f"took over the lock of a run that ended without closing it ({_who(holder)})"
        own = os.getpid()
        _write(self._fd, json.dumps({"pid": own, "host": socket.gethostname(), "started": _started(own)}))

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


def _alive(holder: dict) -> bool:
    """Whether the holder's process is there; one that got its number later is another."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return holder.get("started") in (None, _started(pid))


def _started(pid: int) -> str | None:
    """When a process began, by the kernel's clock and boot; None where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return None


_LOCAL = {"nolock", "localflock", "local_lock=all", "local_lock=flock"}  # of NFS and Lustre


def _of_this_host_only(path: Path) -> bool:
    """Whether locks on ``path`` are not seen by other hosts that may see the file, by the mount's kind and options."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return False
    real = os.path.realpath(path)
    places = [(m[1].encode().decode("unicode_escape"), m[2], m[3]) for m in mounts if len(m) > 3]
    under = [m for m in places if real == m[0] or real.startswith(m[0].rstrip("/") + "/")]
    if not under:
        return False
    _, kind, options = max(reversed(under), key=lambda mount: len(mount[0]))
    return (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs") or not _LOCAL.isdisjoint(options.split(","))
