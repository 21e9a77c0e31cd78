"""Iterative GRPO: policy and reward model trained in turn, round after round."""

from .rounds import iterate
from .settings import Iterate, load_recipe

__all__ = ["Iterate", "iterate", "load_recipe"]
