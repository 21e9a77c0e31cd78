"""Compiles the C files of this folder to a shared library for this machine, when first needed, and caches it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ...models.default import cache_folder

SOURCES = (
    "vectors.h", "draw.h", "product.h", "layers.h", "train.h", "outer.h", "attend.h", "train_attention.h",
    "stack.h", "rows.inc", "attend.inc", "train.inc", "train_attention.inc", "product.inc", "layers.inc", "outer.inc",
    "stack.inc", "kernels.c",
)  # fmt: skip
# No -ffast-math: it lets the compiler assume that NaN and infinity do not occur, and non-finite outputs would pass the
# checks unseen. Fused multiply-adds are allowed.
FLAGS = ("-O3", "-std=gnu11", "-march=native", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def library() -> ctypes.CDLL | str:
    """Returns the library, or why there is none, in words that complete "because ..."."""
    if switched_off():
        return "TREW_NATIVE=0 switches it off"
    compiler = next((found for name in _compilers() if (found := _command(name))), None)
    if compiler is None:
        named = os.environ.get("CC")
        return f"there is no C compiler {named!r}, which CC names" if named else "there is no C compiler (gcc or clang)"
    openmp = _openmp()
    try:
        path = _built(compiler, openmp=openmp is not None)
        if openmp is not None:  # the threads of torch's own runtime, not a second set that would fight with them
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return f"{shlex.join(compiler)} failed: {lines[0] if lines else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the library could not be built or loaded: {error}"


def switched_off() -> bool:
    """Whether the user has switched the library off."""
    return os.environ.get("TREW_NATIVE", "1") == "0"


def sharded(model: Any) -> str | None:
    """Whether parameters of the model are sharded: why that rules the kernels out, in words that complete "because
    ..."; else None."""
    module = sys.modules.get("torch.distributed.tensor")  # loaded if any DTensor exists; importing it is slow
    kind = getattr(module, "DTensor", None)
    for name, p in model.named_parameters():
        if kind is not None and (isinstance(p, kind) or isinstance(p.data, kind)):
            return f"its {name} is sharded over processes (DTensor), and the kernels read whole tensors"
    return None


SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Types T that the kernels are compiled for."""
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def kernel(name: str, dtype: torch.dtype | None, arguments: str) -> Any:
    """Returns a function of the library, for T or (None) independent of it. ``arguments``: one letter each, for
    pointers, integers and floats. The function returns an int64 or nothing."""
    found = library()
    assert not isinstance(found, str), found
    # One C function per type T, name_f32 and name_bf16: kernels.c includes the .inc files once for each.
    function = getattr(found, name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    function.argtypes, function.restype = [_TYPES[a] for a in arguments], ctypes.c_int64
    return function


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Declares consecutive members of one type in a structure that the library reads."""
    return tuple((name, kind) for name in names)


def _compilers() -> tuple[str, ...]:
    return (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang", "cc")


def _command(name: str) -> list[str]:
    """The command of a compiler, whose first word is found; empty if it is not. CC may have arguments, and a launcher
    in front, as make and Python's own builds accept it: ``ccache gcc``."""
    try:
        words = shlex.split(name)
    except ValueError:  # a quotation mark that is not closed
        return []
    found = shutil.which(words[0]) if words else None
    return [found, *words[1:]] if found else []


def _openmp() -> str | None:
    """Returns the file of the OpenMP runtime that torch has loaded; None if there is none to share (macOS, Windows)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    # The path is the sixth column and all that follows: folders may have spaces in their names.
    files = {columns[5] for line in lines if len(columns := line.split(maxsplit=5)) == 6}
    found = sorted(f for f in files if Path(f).name.startswith(("libgomp", "libiomp5", "libomp")))
    # With two runtimes loaded there is no telling which one torch uses.
    return found[0] if len(found) == 1 else None


def _built(compiler: list[str], *, openmp: bool) -> Path:
    """Builds the library if needed; returns its file in the cache folder, named by a hash of all that it depends on:
    sources, compiler, flags, processor. So a stale library is never loaded."""
    here = Path(__file__).parent
    flags = [*FLAGS, *(["-fopenmp"] if openmp else [])]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    digest = hashlib.blake2b(digest_size=12)
    # The NUL keeps two different lists of parts from giving the same bytes.
    options = " ".join([*compiler[1:], *flags])
    for part in (*(here.joinpath(name).read_text() for name in SOURCES), version, options, _processor()):
        digest.update(part.encode() + b"\0")
    folder = cache_folder()
    path = folder / f"native-{digest.hexdigest()}.so"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # In the folder of the result, because replace() cannot move a file to another file system.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, both = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        for command in (
            [*compiler, *flags, "-c", str(here / "kernels.c"), "-o", str(made)],
            # Linked without -fopenmp: its functions are those of the runtime that is loaded already.
            [*compiler, "-shared", str(made), "-o", str(both), "-lm"],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        both.replace(path)  # atomic: several processes may build at the same time
    return path


def _processor() -> str:
    """Identifies what ``-march=native`` depends on: machines may share a home folder, and code built for another
    processor would crash with an illegal instruction."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
