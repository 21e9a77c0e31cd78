"""Iterative GRPO: trains policy and reward model in turn, in rounds."""

from .rounds import iterate
from .settings import Iterate, load_recipe

__all__ = ["Iterate", "iterate", "load_recipe"]
