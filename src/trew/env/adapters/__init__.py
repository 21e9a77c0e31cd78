"""Environments of other packages as ours: one module per kind, which imports its package when one is loaded.

Each refuses by name what it cannot honour.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..protocol import Environment

Adapted = tuple[Callable[[], Environment], Mapping[str, str]]
"""What makes one episode's environment, and the SHA-256 of users' files by path."""

ADAPTERS: Mapping[str, str] = {
    "trl": "trl",
    "gym": "gym",
    "textarena": "arena",
    "reasoning_gym": "reasoning_gym",
    "openenv": "openenv",
    "verifiers": "verifiers",
}
"""Modules here, by what stands before the first colon of an environment's name."""

JUDGE_STOPPED = frozenset({"trl"})
"""Kinds whose environments judge episodes that a budget has ended (:class:`~..protocol.JudgesStopped`)."""


def adapt(kind: str, name: str, args: Mapping[str, Any]) -> Adapted:
    """Makes an environment of ``kind`` from the rest of its name and its arguments. Raises ConfigError.

    Its module is imported here: each host of episodes would otherwise import all of them, and needs one or none.
    """
    module = importlib.import_module(f".{ADAPTERS[kind]}", __name__)
    return module.adapt(name, args)
