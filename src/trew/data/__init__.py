"""Prompts: where they come from, which of them a step takes, and what happens to those that are too long."""

from .load import Dataset, load_eval, load_prompts, load_task, make_task
from .overlong import apply_overlong, truncate_left
from .sampler import PromptSampler

__all__ = [
    "Dataset",
    "PromptSampler",
    "apply_overlong",
    "load_eval",
    "load_prompts",
    "load_task",
    "make_task",
    "truncate_left",
]
