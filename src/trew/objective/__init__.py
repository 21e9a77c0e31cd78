"""The mathematics: pure functions on tensors, composed into ``Objective``. Needs torch alone."""

from .batch import Denominators, TokenBatch
from .objective import LossOutput, Objective, step_metrics
from .presets import preset, presets

__all__ = ["Denominators", "LossOutput", "Objective", "TokenBatch", "preset", "presets", "step_metrics"]
