"""Another user than root: a command of this interpreter as somebody who has nothing, for tests of the sandbox.

Interpreter and project may lie in folders that root alone may enter. The child then sees them through mounts of its
own, which end with it: nothing of the machine changes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trew.rewards.sandbox.host import stage

NUMBER = 54321  # nobody has it: no task of another program counts against its limits
PROJECT = Path(__file__).parents[1]


def run(arguments: Sequence[str], *, env: dict[str, str], timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """The interpreter with ``arguments`` as another user than root: as this one where it is another.

    The test is skipped where another user cannot reach the interpreter and no mounts can be made for it.
    """
    if os.geteuid() != 0:
        return run_as_this(arguments, env=env, timeout=timeout)
    paths = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, PROJECT, *sys.path) if os.path.isdir(p)}
    closed = {Path(p): _closed(Path(p)) for p in sorted(paths)}
    behind = {path: door for path, door in closed.items() if door is not None}

    def become() -> None:
        if behind:
            _open_up(behind)
        os.setgroups([])
        os.setresgid(NUMBER, NUMBER, NUMBER)
        os.setresuid(NUMBER, NUMBER, NUMBER)

    try:
        return run_as_this(arguments, env={"HOME": "/nonexistent", **env}, timeout=timeout, become=become)
    except subprocess.SubprocessError as error:
        if behind and not isinstance(error, subprocess.TimeoutExpired):
            pytest.skip(f"another user cannot reach {next(iter(behind))}, and no mounts can be made here")
        raise


def run_as_this(
    arguments: Sequence[str], *, env: dict[str, str], timeout: float = 600, become: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same as the user who runs the tests."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *arguments], preexec_fn=become, cwd=PROJECT, capture_output=True, text=True, timeout=timeout,
        check=False, env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env},
    )  # fmt: skip


def _closed(path: Path) -> Path | None:
    """The first folder on the way to ``path``, or itself, that not everybody may enter and read."""
    way = [*reversed(path.parents), path]
    return next((p for p in way if p.stat().st_mode & (0o5 if p == path else 0o1) != (0o5 if p == path else 0o1)), None)


def _open_up(behind: dict[Path, Path]) -> None:
    """Puts an empty folder over each closed one, and into it what lies behind, in mounts of this process alone."""
    stage._checked(ctypes.CDLL(None, use_errno=True).unshare(stage._NEWNS))
    stage._mount(None, "/", None, stage._REC | stage._PRIVATE)
    sources = {}  # opened before anything is covered
    for path, door in behind.items():
        for part in sorted(path.iterdir()) if path == door else [path]:
            sources[part] = os.open(part, os.O_PATH | os.O_CLOEXEC)
    for door in dict.fromkeys(behind.values()):
        stage._mount("tmpfs", str(door), "tmpfs", 0, "mode=0755,size=1m")
    for part, source in sources.items():
        real = f"/proc/self/fd/{source}"
        if os.path.isdir(real):
            part.mkdir(parents=True, exist_ok=True)
        else:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
        stage._mount(real, str(part), None, stage._BIND | stage._REC)
