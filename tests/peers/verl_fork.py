"""Python code in a process that has not imported verl or trew, but all that these need: a fork of this process that
has forgotten them. A new interpreter takes ten seconds to import verl."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

OWN = str(Path(__file__).parents[2] / "src")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As ``python -c CODE`` with these environment variables, ``PYTHONPATH`` among them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.NamedTemporaryFile("w") as script:
        script.write(code)
        script.flush()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                status = _run(script.name, variables, out.fileno(), err.fileno())
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([code], status, out.read().decode(), err.read().decode())


def as_run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """In the place of ``subprocess.run`` for ``[python, "-c", code]``."""
    return python(command[2])


def _run(script: str, variables: dict[str, str], out: int, err: int) -> int:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()  # pytest's: what is logged goes to stderr
    before = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), OWN}
    os.environ.update(variables)
    if "PYTHONPATH" in variables:
        elsewhere = [path for path in sys.path if path and path not in before and str(Path(path).resolve()) != OWN]
        sys.path[:] = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path] + elsewhere
    sys.meta_path[:] = [finder for finder in sys.meta_path if "jaxtyping" not in type(finder).__module__]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verl", "trew")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
