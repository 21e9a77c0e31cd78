"""Entry script of every worker: ``python boot.py START``, where START is JSON written by ``worker.Worker``.

Modules of ``isolation`` and ``sandbox`` are imported under the package name ``trew_worker``, whose ``__init__`` modules
are empty. Their relative imports work, and the rest of trew is not imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

PACKAGES = {"trew_worker": "", "trew_worker.isolation": "isolation", "trew_worker.sandbox": "sandbox"}


def boot(
    *, module: str, arguments: dict[str, Any], parent: int, life: int | None, path: list[str] | None,
    grace_s: float = 0.0,
) -> None:  # fmt: skip
    """Moves the pipes to ``parent`` away from standard input and output, then runs ``module.main``.

    ``life`` is the pipe that a guardian watches, ``grace_s`` the seconds that it leaves before it kills."""
    # Empty stand-ins for the packages: importing the real ``trew`` would run its __init__ modules, numpy included.
    rewards = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name, folder in PACKAGES.items():
        package = sys.modules[name] = type(sys)(name)
        package.__path__ = [os.path.join(rewards, folder)]
    # Duplicates first: descriptors 0 and 1 are replaced below, and imports may print.
    pipes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # a print must not write into the message stream
    os.close(null)
    watched = None
    if life is not None:
        # The guardian is forked here, before any other import, so that it stays small for the whole run.
        from trew_worker.isolation.guardian import stand_guard  # pyrefly: ignore[missing-import]

        # With a guardian the worker has no use for the pipe; without one it has to watch the pipe itself.
        watched = {"life": None if stand_guard(life, grace_s=grace_s) else life}
    if path is not None:
        sys.path[:] = path
    importlib.import_module(module).main(*pipes, parent=parent, **arguments, **(watched or {}))


if __name__ == "__main__":
    given, sys.argv[1:] = sys.argv[1], []
    boot(**json.loads(given))
