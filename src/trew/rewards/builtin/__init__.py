"""Rewards that come with trew, one file per kind with its ``grade``; ``kinds`` has the table of them."""

from .kinds import (
    KINDS,
    Kind,
    argument_problems,
    first_column,
    gold_problem,
    gold_problems,
    grade,
    graded,
    graded_together,
    unknown_kind,
)

__all__ = [
    "KINDS", "Kind", "argument_problems", "first_column", "gold_problem", "gold_problems", "grade", "graded",
    "graded_together", "unknown_kind",
]  # fmt: skip
