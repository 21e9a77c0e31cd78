"""What must be the same on a run's machine and on a reward host, so that both give the same scores."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..combine import Reward
from ..sandbox.choose import describe

PACKAGES = ("numpy", "math-verify", "latex2sympy2_extended", "sympy", "reasoning-gym")
"""Packages that decide scores."""


def described(rewards: Sequence[Reward]) -> dict[str, Any]:
    """The rewards with their files' SHA-256, trew's own grading code, Python, the packages that decide scores, and for
    programs the sandbox: behind Landlock, those that write files or start processes are wrong."""
    programs = any(reward.kind in ("code_stdin", "code_func") for reward in rewards)
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "trew's rewards": _own(),
        **{f"package {name}": _version(name) for name in PACKAGES},
        **({"sandbox": describe()[0] or "none"} if programs else {}),
        **{f"reward {i} {reward.name!r}": _reward(reward) for i, reward in enumerate(rewards)},
    }


def differences(run: Mapping[str, Any], host: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line for everything that differs.

    >>> list(differences({"python": "3.11", "reward 0 'f'": "a"}, {"python": "3.12", "reward 0 'f'": "a"}))
    ["python: '3.11' in the run, '3.12' on the host"]
    """
    for key in dict.fromkeys((*run, *host)):
        if run.get(key) != host.get(key):
            yield f"{key}: {run.get(key, 'absent')!r:.300} in the run, {host.get(key, 'absent')!r:.300} on the host"


def _reward(reward: Reward) -> str:
    """What decides a reward's verdicts. Its weight and what happens when it fails are the run's own affair."""
    args = ", ".join(f"{name} = {value!r}" for name, value in sorted(reward.args.items()))
    if reward.model is not None:
        return "a reward model"  # scored by the run itself
    if reward.function is None:
        return f"{reward.kind}({args})"
    files = " ".join(f"{name} {digest[:16]}" for name, digest in sorted(reward.function.sources.items()))
    return f"{reward.function.file.name}:{reward.function.name}({args}), SHA-256: {files}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _own() -> str:
    """A digest of trew's code that grades."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
