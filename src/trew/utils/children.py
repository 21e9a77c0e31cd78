"""The environment of processes that run Python code of users and of packages."""

from __future__ import annotations

import os


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with ``changes``, and without PYTHONOPTIMIZE: Python would skip ``assert`` in
    the child, by which rewards and environments may judge, and packages check their arguments."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    return {**kept, **changes}
