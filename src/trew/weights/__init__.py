"""Transfers weights from the learner to the engine."""

from .sync import InPlace, WeightSync

__all__ = ["InPlace", "WeightSync"]
