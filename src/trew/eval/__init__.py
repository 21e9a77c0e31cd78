"""Measures a policy's accuracy on held-out prompts, with confidence intervals."""

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
