"""From samples and an objective to weight updates: packing, forward passes, the optimizer."""

from .accumulate import Accumulated
from .packing import Sample
from .policy import Policy
from .step import Learner

__all__ = ["Accumulated", "Learner", "Policy", "Sample"]
