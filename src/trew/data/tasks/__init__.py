"""Tasks turn rows, or an argument table, into prompts. Each task is a dataclass of its arguments."""

from __future__ import annotations

from .arithmetic import Arithmetic
from .base import Task
from .countdown import Countdown
from .demonstrations import Demonstrations, Rollouts
from .gsm8k import Gsm8k
from .humaneval import HumanEval
from .maths import Math
from .mbpp import Mbpp
from .pairs import Pairs
from .prompts import Prompts
from .puzzles import Puzzles

TASKS: dict[str, type[Task]] = {
    "gsm8k": Gsm8k,
    "math": Math,
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "mbpp": Mbpp,
    "humaneval": HumanEval,
    "reasoning-gym": Puzzles,
    "prompts": Prompts,
    "demonstrations": Demonstrations,
    "rollouts": Rollouts,
    "pairs": Pairs,
}

__all__ = [
    "TASKS",
    "Arithmetic",
    "Countdown",
    "Demonstrations",
    "Gsm8k",
    "HumanEval",
    "Math",
    "Mbpp",
    "Pairs",
    "Prompts",
    "Puzzles",
    "Rollouts",
    "Task",
]
