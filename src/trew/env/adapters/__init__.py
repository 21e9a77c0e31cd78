"""Environments of other packages as ours: one module per kind, which imports its package when one is loaded.

Each refuses by name what it cannot honour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..protocol import Environment
from . import arena, gym, openenv, reasoning_gym, trl, verifiers

Adapted = tuple[Callable[[], Environment], Mapping[str, str]]
"""What makes one episode's environment, and the SHA-256 of users' files by path."""

ADAPTERS: Mapping[str, Callable[[str, Mapping[str, Any]], Adapted]] = {
    "trl": trl.adapt,
    "gym": gym.adapt,
    "textarena": arena.adapt,
    "reasoning_gym": reasoning_gym.adapt,
    "openenv": openenv.adapt,
    "verifiers": verifiers.adapt,
}
"""By what stands before the first colon of an environment's name; given the rest and the arguments."""

JUDGE_STOPPED = frozenset({"trl"})
"""Kinds whose environments judge episodes that a budget has ended (:class:`~..protocol.JudgesStopped`)."""
