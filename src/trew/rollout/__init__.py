"""Rollouts: prompts to tokens (``chat``), tokens to completions (``engine``; ``torch_engine`` is the embedded one)."""

from .chat import Renderer
from .engine import Engine

__all__ = ["Engine", "Renderer"]
