"""The mathematics: pure functions on tensors, composed into ``Objective``. Needs torch alone."""

from .batch import Denominators, TokenBatch
from .metrics import step_metrics, token_metrics
from .objective import LossOutput, Objective
from .presets import preset, presets

__all__ = ["Denominators", "LossOutput", "Objective", "TokenBatch", "preset", "presets", "step_metrics",
           "token_metrics"]  # fmt: skip
