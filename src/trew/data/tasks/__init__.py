"""Tasks: how rows, or an argument table, become prompts. One dataclass of arguments per task."""

from __future__ import annotations

from .arithmetic import Arithmetic
from .countdown import Countdown
from .gsm8k import Gsm8k
from .prompts import Prompts

TASKS: dict[str, type[Arithmetic] | type[Countdown] | type[Gsm8k] | type[Prompts]] = {
    "gsm8k": Gsm8k,
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "prompts": Prompts,
}
