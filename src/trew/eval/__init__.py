"""How good a policy is, and how sure one can be of it."""

from .evaluate import EvalResult, correct_by, evaluate
from .statistics import Interval, PairedDifference, mean_interval, paired_difference, pass_at_k, wilson

__all__ = [
    "EvalResult",
    "Interval",
    "PairedDifference",
    "correct_by",
    "evaluate",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "wilson",
]
