"""From samples and an objective to weight updates: packing, forward passes, the optimizer."""

from .accumulate import Accumulated
from .parallel import Parallel, Solo
from .policy import Policy
from .step import Learner

__all__ = ["Accumulated", "Learner", "Parallel", "Policy", "Solo"]
