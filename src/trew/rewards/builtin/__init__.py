"""Built-in rewards: one module with a ``grade`` per kind; ``kinds`` holds their table."""

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
