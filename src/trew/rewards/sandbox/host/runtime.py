"""Finds what a Python program needs on this machine: interpreter, standard library, shared libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Extension modules whose libraries are not worth a mount each: windows, terminals, dbm databases, Python's own tests.
_WITHOUT = ("_tkinter", "readline", "_curses", "_gdbm", "_dbm", "nis.", "_test", "_xx", "xx", "_ctypes_test")
_FOREIGN = ("site-packages", "dist-packages")  # third-party packages, which some installations keep inside the library


@dataclass(frozen=True, slots=True)
class Runtime:
    """Paths as the interpreter looks them up, each with its real file; ``hidden`` lists folders to cover."""

    python: str
    library: str  # the folder of the standard library
    files: tuple[tuple[str, str], ...]  # (path as looked up, real path), without the library folder
    hidden: tuple[str, ...]

    @property
    def mounts(self) -> tuple[tuple[str, str], ...]:
        return ((self.library, os.path.realpath(self.library)), *self.files)


def find() -> Runtime:
    """Finds the running interpreter's runtime, without its virtual environment and installed packages."""
    # The base interpreter: the virtual environment is not part of the sandbox.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    base = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix,
            "installed_platbase": sys.base_exec_prefix}  # fmt: skip
    library = sysconfig.get_path("stdlib", vars=base)
    dynamic = Path(sysconfig.get_path("platstdlib", vars=base)) / "lib-dynload"
    extensions = sorted(str(p) for p in dynamic.glob("*.so") if not p.name.startswith(_WITHOUT))
    paths = {python, *_libraries(python, extensions)}
    inside = library + os.sep
    if not str(dynamic).startswith(inside):
        paths.add(str(dynamic))
    if os.path.exists("/etc/ld.so.cache"):  # tells the loader about libraries in unusual folders
        paths.add("/etc/ld.so.cache")
    files = tuple((path, os.path.realpath(path)) for path in sorted(paths) if not path.startswith(inside))
    hidden = tuple(str(Path(library) / name) for name in _FOREIGN if (Path(library) / name).is_dir())
    return Runtime(python, library, files, hidden)


def _libraries(python: str, extensions: list[str]) -> set[str]:
    """Lists the shared libraries of the interpreter and its extension modules, as the dynamic loader resolves them."""
    # With LD_TRACE_LOADED_OBJECTS the loader prints what it would load and exits, as ldd does. glibc loads libgcc_s by
    # name only when a thread ends, so it is asked for here; a missing one costs a warning.
    environment = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": ":".join([*extensions, "libgcc_s.so.1"])}
    done = subprocess.run([python], env=environment, capture_output=True, text=True, timeout=30, check=False)
    found = set()
    for line in done.stdout.splitlines():
        path = line.split("=>")[-1].split("(")[0].strip()
        if path.startswith("/") and path not in extensions:
            found.add(path)
    return found
