"""Prompts: reading or generating them, choosing the prompts of each step, and handling prompts that are too long."""

from .load import Dataset, load_eval, load_prompts, load_task, make_task
from .overlong import apply_overlong, truncate_left
from .prompt_stream import PromptStream

__all__ = [
    "Dataset",
    "PromptStream",
    "apply_overlong",
    "load_eval",
    "load_prompts",
    "load_task",
    "make_task",
    "truncate_left",
]
