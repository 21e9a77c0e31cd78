"""Environments of other packages as ours: one module per kind, which imports its package when one is loaded.

Each refuses by name what it cannot honour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..protocol import Environment
from . import arena, gym, openenv, reasoning_gym, trl, verifiers

Make = Callable[[], Environment]
Adapted = tuple[Make, Mapping[str, str]] | tuple[Make, Mapping[str, str], bool]
"""What makes one episode's environment, the SHA-256 of users' files by path, and whether it judges stopped episodes."""

ADAPTERS: Mapping[str, Callable[[str, Mapping[str, Any]], Adapted]] = {
    "trl": trl.adapt,
    "gym": gym.adapt,
    "textarena": arena.adapt,
    "reasoning_gym": reasoning_gym.adapt,
    "openenv": openenv.adapt,
    "verifiers": verifiers.adapt,
}
"""By what stands before the first colon of an environment's name; given the rest and the arguments."""
