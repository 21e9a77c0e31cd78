"""What every worker runs first, as a script: ``python boot.py START``; ``worker.Worker`` writes START, which is JSON.

Modules of this room and of the sandbox are imported under the name ``trew_worker``, whose packages are empty: so they
find each other, and nothing of trew comes with them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

PACKAGES = {"trew_worker": "", "trew_worker.isolation": "isolation", "trew_worker.sandbox": "sandbox"}


def boot(*, module: str, arguments: dict[str, Any], parent: int, life: int | None, path: list[str] | None) -> None:
    """Frees standard input and output, which are the pipes to ``parent``, for whatever reads and prints; then runs
    ``module.main``. ``life`` is the pipe that a guardian watches."""
    rewards = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name, folder in PACKAGES.items():
        package = sys.modules[name] = type(sys)(name)
        package.__path__ = [os.path.join(rewards, folder)]
    pipes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # nothing that is printed may get between the messages
    os.close(null)
    watched = None
    if life is not None:
        # Before anything else is imported: the guardian, which is forked here, stays small.
        from trew_worker.isolation.guardian import stand_guard  # pyright: ignore[reportMissingImports]

        watched = {"life": None if stand_guard(life) else life}
    if path is not None:
        sys.path[:] = path
    importlib.import_module(module).main(*pipes, parent=parent, **arguments, **(watched or {}))


if __name__ == "__main__":
    given, sys.argv[1:] = sys.argv[1], []
    boot(**json.loads(given))
