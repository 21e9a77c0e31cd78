"""Rollouts: tokenises prompts (``chat``), generates completions (``engine``; ``torch_engine`` is the embedded engine,
``vllm`` asks servers) and supplies scored groups for each step (``source``, ``sync``)."""

from .chat import Renderer
from .engine import Engine
from .source import RolloutSource, StepRollouts

__all__ = ["Engine", "Renderer", "RolloutSource", "StepRollouts"]
