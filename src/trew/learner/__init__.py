"""From samples and an objective to weight updates: packing, forward passes, the optimizer."""

from .packing import Sample
from .step import Learner

__all__ = ["Learner", "Sample"]
