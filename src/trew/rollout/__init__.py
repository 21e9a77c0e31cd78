"""Rollouts: prompts to tokens (``chat``), tokens to rollouts (``engine``; ``torch_engine`` is the embedded one), and
scored groups for each step (``source``, ``sync``)."""

from .chat import Renderer
from .engine import Engine
from .source import RolloutSource, StepRollouts

__all__ = ["Engine", "Renderer", "RolloutSource", "StepRollouts"]
