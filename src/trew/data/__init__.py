"""Prompts: reading or generating them, choosing the prompts of each step, and handling prompts that are too long."""

from .load import Dataset, load_eval, load_eval_of_sets, load_prompts, load_sets, load_split, load_task, make_task
from .mixture import by_set
from .order import PromptOrder, prompt_order
from .overlong import apply_overlong, fitting, truncate_left
from .prompt_stream import PromptStream

__all__ = [
    "Dataset",
    "PromptOrder",
    "PromptStream",
    "apply_overlong",
    "by_set",
    "fitting",
    "load_eval",
    "load_eval_of_sets",
    "load_prompts",
    "load_sets",
    "load_split",
    "load_task",
    "make_task",
    "prompt_order",
    "truncate_left",
]
