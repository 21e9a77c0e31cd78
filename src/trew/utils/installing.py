"""The commands that install what is missing: every hint of trew's comes from here.

They name the packages themselves, not an extra of trew, and the Python that runs: such a command works from a checkout,
with a wheel, without an activated environment, and whether or not a package index has trew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path


def install_packages(*packages: str, python: str | Path | None = None) -> str:
    """The command that installs ``packages`` (requirements such as ``peft>=0.20``) for ``python``, by default the one
    that runs."""
    quoted = " ".join(shlex.quote(package) for package in packages)
    if python is not None or _has_pip():
        return f"{_shown(python or sys.executable)} -m pip install {quoted}"
    return f"uv pip install --python {_shown(sys.executable)} {quoted}"  # environments that uv made have no pip


def _has_pip() -> bool:
    # Not by find_spec: setuptools takes a search for pip as a sign that pip runs, and gives up its distutils for the
    # rest of the process, in which torch.compile then fails.
    return next(iter(importlib.metadata.distributions(name="pip")), None) is not None


def install_extra(name: str) -> str:
    """The command that installs the packages of trew's extra ``name``."""
    return install_packages(*requirements()[name])


def install_trew() -> str:
    """The command that makes trew a package of this Python where it is only found on the path."""
    root = checkout()
    return "install trew here, as docs/install.md says" if root is None else install_packages("-e", str(root))


def checkout() -> Path | None:
    """The folder of the checkout that this code is part of; None if it was installed from a package."""
    # src/trew/utils/installing.py is three folders below the root of a checkout.
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "src" / "trew").is_dir() else None


def requirements() -> dict[str, list[str]]:
    """trew's requirements by extra, those that are always needed under "". A checkout is read itself: what pip knows of
    it is as old as its installation."""
    if (root := checkout()) is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires("trew") or ():
        requirement, _, marker = line.partition(";")
        # A marker may have more than the extra: python_version < "3.12" and extra == "trl".
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", marker)
        found.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return found


def _shown(python: str | Path) -> str:
    """The path of ``python``, relative where it is below the current folder, if that still exists."""
    path = str(python) or "python"
    if python:
        with contextlib.suppress(OSError):
            # Not resolved: a venv's python is a link.
            path = os.path.abspath(python).removeprefix(os.getcwd() + os.sep)
    return shlex.quote(path)
