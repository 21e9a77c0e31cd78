"""What tests of the sandbox look at from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def supervisors() -> list[int]:
    """The sandbox's processes right below this one. Other tests have children too, and wait for them.

    Found among all processes: the kernel's list of a process's children may miss some while others end.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"supervisor" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
