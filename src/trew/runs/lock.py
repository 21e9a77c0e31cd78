"""One run per folder: an advisory lock (filelock) that the kernel frees when its process dies."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

from ..errors import ConfigError

_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Lock:
    """Holds ``run.lock``. The file's content (pid and host) names the holder in the message for whoever comes second.

    The lock itself is flock: it needs no clock, and no cleanup after kill -9. Where the file system has no flock, or
    does not show it to other hosts, the content decides: a live process of this host, or any process of another host,
    counts as holding the lock.
    """

    def __init__(self, path: Path):
        """Takes the lock, or raises ConfigError naming the holder. ``stale`` describes a holder that died."""
        from filelock import FileLock, Timeout  # not for `trew --help`

        self.path = path
        self.stale: str | None = None
        # Not per thread: a run may be closed by another thread than the one that opened it. No fallback to a lock file
        # that merely exists: after kill -9 it would stay.
        self._lock = FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(blocking=False)
            # Where other hosts do not see the lock, having it proves nothing about them.
            decisive = not _of_this_host_only(path)
        except Timeout:
            raise ConfigError(self._refusal(_read(path))) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            decisive = False
        try:
            self._sign(decisive)
        except BaseException:
            self._lock.release()
            raise

    def _sign(self, decisive: bool) -> None:
        """Writes this process into the file; refuses if the last holder may still run and flock cannot show it."""
        # Read after flock is held: nobody else writes it now.
        holder = _read(self.path)
        if holder and not decisive and (holder.get("host") != socket.gethostname() or _alive(holder)):
            raise ConfigError(self._refusal(holder))
        # It is dead: else flock would not have been free, or the test above would have refused.
        if holder:
            self.stale = f"took over the lock of a run that ended without closing it ({_who(holder)})"
        own = os.getpid()
        _write(self.path, json.dumps({"pid": own, "host": socket.gethostname(), "started": _started(own)}))
        self._signed = True

    def _refusal(self, holder: dict) -> str:
        return (
            f"out: {self.path.parent} is in use by another run ({_who(holder)}); wait for it, stop it, "
            f"or choose another folder. If that run is certainly over, delete {self.path}"
        )

    def release(self) -> None:
        """Frees the folder. The file stays, but empty: if it were removed, two newcomers could lock two files."""
        if self._signed:
            self._signed = False
            # Before the release: afterwards it would erase what the next holder has written.
            _write(self.path, "")
            self._lock.release()


def held(content: bytes) -> bool | None:
    """Whether a live process holds the lock whose file has this ``content``; None if it names one of another host."""
    holder = _parse(content)
    if not holder:
        return False
    return _alive(holder) if holder.get("host") == socket.gethostname() else None


def _read(path: Path) -> dict:
    """The holder that the file names; an empty dict if it names none."""
    try:
        return _parse(path.read_bytes())
    except OSError:
        # Not empty: what cannot be read counts as held, by somebody unknown.
        return _parse(b"?")


def _parse(content: bytes) -> dict:
    try:
        holder = json.loads(content[:4096] or b"{}")
    except (ValueError, RecursionError):
        return {"pid": "unknown", "host": "unknown"}
    return holder if isinstance(holder, dict) else {}


def _write(path: Path, text: str) -> None:
    """Replaces the file's content. On a full disk the lock still holds; only its message is poorer."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(text)
    except OSError:
        pass


def _who(holder: dict) -> str:
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')}"


def _alive(holder: dict) -> bool:
    """Whether the holder's process still runs; a later process that got the same pid is another one."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # signal 0 checks for existence only
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, as another user's process
    return holder.get("started") in (None, _started(pid))


def _started(pid: int) -> str | None:
    """When a process started, as boot id and kernel clock; None if there is no /proc."""
    try:
        # The name in parentheses may hold spaces and parentheses itself, so fields count from the last one. Then field
        # 22, starttime, is at index 19. The boot id distinguishes equal ticks of two boots.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return None


_LOCAL = {"nolock", "localflock", "local_lock=all", "local_lock=flock"}  # mount options of NFS and Lustre


def _of_this_host_only(path: Path) -> bool:
    """Whether other hosts may see the file but not its locks, judged by the mount's type and options."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return False
    real = os.path.realpath(path)
    # /proc/self/mounts writes blanks in names as octal escapes.
    places = [(m[1].encode().decode("unicode_escape"), m[2], m[3]) for m in mounts if len(m) > 3]
    under = [m for m in places if real == m[0] or real.startswith(m[0].rstrip("/") + "/")]
    if not under:
        return False
    # The longest mount point is the closest; of equals the last one counts, which is mounted over the others.
    _, kind, options = max(reversed(under), key=lambda mount: len(mount[0]))
    # fuse-overlayfs is a container's own file system, which no other host sees.
    return (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs") or not _LOCAL.isdisjoint(options.split(","))
