"""The largest numbers that settings accept: larger ones would exhaust memory or threads before any check could run.

They are far above any practical need. A setting with a tighter limit has its own rule in ``rules``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigError

WHOLE = 2**31 - 1
"""For whole numbers without a limit under their own name."""
NUMBER = 1e9
"""For the absolute value of other numbers."""
COLDEST = 1e-6
"""The lowest temperature above 0: logits divided by less leave what float32 can hold."""
COMPLETIONS = 1_000_000
"""Completions per step, all in memory at once."""
LINE_BYTES = 64 << 20
"""The length of one line (one row) of a data file."""
FILE_BYTES = 8 << 30
"""The size of a data file, uncompressed."""
FILE_ROWS = 50_000_000
"""The rows of a Parquet file: each may take next to nothing in the file, and some hundred bytes in memory."""
PROMPT_CHARACTERS = 4_000_000
"""The length of a prompt before tokenization."""
MODEL_PARTS = 10_000
"""Layers, heads or experts of a model: building each costs time and memory, even before its weights are loaded."""
MODEL_WIDTH = 10_000_000
"""A width or a vocabulary of a model: tables of that length are made when it is built."""
_DAYS_12 = 1e6  # seconds; operating system timers overflow after years

MOST: dict[str, float] = {
    "threads": 1024,
    "steps": 10_000_000,
    "environment.episodes": 1_000_000,
    "environment.turns": 10_000,
    "environment.timeout_s": _DAYS_12,
    "environment.workers": 1024,
    "rollout.prompts": 100_000,
    "rollout.completions": 100_000,
    "rollout.max_tokens": 10_000_000,
    "rollout.refills": 10_000,
    "rollout.stale_steps": 1000,
    "sft.epochs": 10_000,
    "sft.batch": 100_000,
    "sft.max_tokens": 10_000_000,
    "learner.inner_updates": 10_000,
    "learner.batch": 100_000,
    "cluster.learner": 4096,
    "cluster.restarts": 1000,
    "lora.rank": 4096,
    "lora.alpha": 1e6,
    "cluster.resources_timeout_s": _DAYS_12,
    "cluster.servers": 1024,
    "cluster.server_gpus": 1024,
    "cluster.staleness": 1000,
    "cluster.request_timeout_s": _DAYS_12,
    "cluster.sync_timeout_s": _DAYS_12,
    "eval.samples": 10_000,
    "eval.max_tokens": 10_000_000,
    "stop.grace_s": _DAYS_12,
    "rewards.weight": 1e6,
    "rewards.timeout_s": _DAYS_12,
    "epochs": 10_000,
    "data.pairs_per_prompt": 10_000,
    "data.args.size": 1_000_000,
    "data.weight": 1e6,
    "iterate.weight": 1e6,
    "iterate.rounds": 10_000,
    "iterate.prompts": 100_000,
    "iterate.first_prompts": 100_000,
    "iterate.completions": 100_000,
    "iterate.pairs_per_prompt": 10_000,
    "iterate.epochs": 10_000,
    "iterate.first_epochs": 10_000,
}
"""Limits by the setting's name in a recipe."""


def problem(name: str, value: int | float) -> str:
    """Describes a number that is too large; empty for others. ``name`` is dotted, with list indices: rewards[0].weight.

    Accepts inf and nan: the rules refuse them, and say what the setting is for.

    >>> problem("threads", 100_000)
    'threads: got 100000, accepts at most 1,024'
    >>> problem("rewards[1].weight", -0.5)
    ''
    """
    # Limits are by setting, not by list entry: rewards[0].weight has that of rewards.weight.
    most = MOST.get(re.sub(r"\[\d+\]", "", name), WHOLE if isinstance(value, int) else NUMBER)
    if value != value or abs(value) in (float("inf"), 0.0) or abs(value) <= most:
        return ""
    accepts = f"at least -{most:,.0f}" if value < 0 else f"at most {most:,.0f}"
    return f"{name}: got {value!r}, accepts {accepts}"


def problems(settings: Any, where: str = "") -> list[str]:
    """Describes every number that is too large in a dataclass of settings, including nested ones."""
    return [found for name, value in _numbers(settings, where) if (found := problem(name, value))]


def refuse(settings: Any, *, found: Sequence[str] = ()) -> None:
    """Raises ConfigError if a number is too large, with the problems ``found`` before it."""
    if too_large := problems(settings):
        raise ConfigError([*found, *too_large])


def _numbers(settings: Any, where: str) -> Iterator[tuple[str, int | float]]:
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{where}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, tuple):
            # Several data sets, and rewards; tuples of plain values have no limits.
            for i, inner in enumerate(value):
                if dataclasses.is_dataclass(inner):
                    yield from _numbers(inner, f"{name}[{i}].")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
