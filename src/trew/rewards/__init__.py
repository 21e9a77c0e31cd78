"""Scores completions: ``grade`` applies a built-in reward to one completion, ``RewardSet`` scores whole groups."""

from .builtin import KINDS, grade
from .reward_set import RewardSet
from .user import session
from .verdict import Verdict

__all__ = ["KINDS", "RewardSet", "Verdict", "grade", "session"]
