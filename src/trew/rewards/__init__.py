"""Scores completions: ``grade`` applies a built-in reward to one completion, ``RewardSet`` scores whole groups.

What is named here is imported when it is used: processes that run a user's functions need none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builtin.kinds import KINDS as KINDS
    from .builtin.kinds import grade as grade
    from .reward_set import RewardSet as RewardSet
    from .user import session as session
    from .verdict import Verdict as Verdict

_HOME = {"KINDS": "builtin.kinds", "RewardSet": "reward_set", "Verdict": "verdict", "grade": "builtin.kinds"}

__all__ = ["KINDS", "RewardSet", "Verdict", "grade", "session"]


def __getattr__(name: str) -> Any:
    if name == "session":
        return importlib.import_module(".user.session", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
