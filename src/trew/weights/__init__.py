"""Transfers weights from the learner to the engine: in place (``sync``), or as published versions (``publisher``)."""

from .sync import InPlace, WeightSync

__all__ = ["InPlace", "WeightSync"]
