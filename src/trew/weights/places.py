"""Chooses the folder of published weights: in shared memory if they fit, otherwise below the run's folder."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import StorageError
from ..utils.memory import free_bytes

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "trew-weights-"
"""Of these folders alone: where temporary files are in shared memory too, those of running jobs lie beside them."""
MIB = 1 << 20
VERSIONS = 3
"""Versions that must fit: two are kept while another is written."""


class WeightFolder:
    """A folder for published versions; ``shared``: other machines may read its file system."""

    def __init__(self, folder: Path, *, shared: bool, lock: FileLock | None = None) -> None:
        self.folder, self.shared = folder, shared
        self._lock = lock

    def close(self) -> None:
        """Removes the folder."""
        # With a lock the parent is this process's own folder in shared memory; without one it is the run's.
        shutil.rmtree(self.folder if self._lock is None else self.folder.parent, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def place_for(run: Path, *, size: int, local: bool) -> WeightFolder:
    """Makes a place for versions of ``size`` bytes. ``local``: all servers run on this machine and can read shared
    memory; otherwise they read the run's folder ``run``."""
    if local and _fits(SHARED_MEMORY, size):
        with contextlib.suppress(OSError):
            return _in_memory(SHARED_MEMORY)
    folder = run.resolve() / "weights"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed: this one holds the run's lock
    folder.mkdir(parents=True, mode=0o700)
    return WeightFolder(folder, shared=True)


def in_shared_memory(size: int) -> WeightFolder:
    """Makes a place in shared memory for versions of ``size`` bytes. Raises StorageError if two do not fit there, the
    one that is in use and the next."""
    try:
        if (room := shutil.disk_usage(SHARED_MEMORY).free) < 2 * size:
            raise StorageError(
                f"cluster.sync: got 'ipc', which keeps two versions of {size / MIB:,.1f} MiB in {SHARED_MEMORY}, where "
                f"{room / MIB:,.1f} MiB are free; make it larger (docker run --shm-size), or set cluster.sync = 'files'"
            )
        return _in_memory(SHARED_MEMORY)
    except OSError as error:
        raise StorageError(
            f"cluster.sync: got 'ipc', but {SHARED_MEMORY} cannot be used: {error.strerror or error}; set cluster.sync "
            "= 'files'"
        ) from None


def _fits(memory: Path, size: int) -> bool:
    try:
        room = shutil.disk_usage(memory).free
    except OSError:  # not on every system
        return False
    # Its files take RAM, which everything else needs too.
    free = free_bytes()
    return VERSIONS * size <= min(room, room if free is None else free // 2)


def _in_memory(memory: Path) -> WeightFolder:
    """Makes a folder in shared memory that is locked while its process lives; removes those of killed processes."""
    for left in memory.glob(f"{PREFIX}*"):
        _remove_abandoned(left)
    # It gets its name once it is locked: another process that starts now must not take it for abandoned.
    work = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=memory))  # for this user alone
    # thread_local=False: whichever thread closes the folder releases the lock that this one takes.
    lock = FileLock(work / "lock", thread_local=False)
    lock.acquire(blocking=False)
    folder = memory / work.name.removeprefix(".")
    work.rename(folder)
    (folder / "weights").mkdir()
    return WeightFolder(folder / "weights", shared=False, lock=lock)


def _remove_abandoned(folder: Path) -> None:
    # FileLock would make a missing one, and then hold it: what nobody has locked is not ours to remove.
    if not (folder / "lock").is_file():
        return
    with contextlib.suppress(OSError, Timeout):  # another user's, or in use
        lock = FileLock(folder / "lock", thread_local=False)
        # The system releases the lock of a process that dies: one that can be taken has no owner.
        lock.acquire(blocking=False)
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
