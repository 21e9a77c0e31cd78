"""The largest numbers that settings accept: beyond them, memory or threads run out before anything can be said.

They are far above what anybody needs; a setting that means something only below a smaller number says so by a rule of
its own (see ``rules``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigError

WHOLE = 2**31 - 1
"""Whole numbers that have no limit of their own."""
NUMBER = 1e9
"""Other numbers, in size."""
COMPLETIONS = 1_000_000
"""Completions of a step, which are in memory together."""
LINE_BYTES = 64 << 20
"""One line of a data file, which is one row."""
FILE_BYTES = 8 << 30
"""A data file of text, unpacked."""
PROMPT_CHARACTERS = 4_000_000
"""A prompt, before it is tokenised."""
MODEL_PARTS = 10_000
"""Layers, heads or experts of a model: each costs time and memory when it is built, before any weight."""
_DAYS_12 = 1e6  # seconds; timers of the operating system take no more than some years

MOST: dict[str, float] = {
    "threads": 1024,
    "steps": 10_000_000,
    "rollout.prompts": 100_000,
    "rollout.completions": 100_000,
    "rollout.max_tokens": 10_000_000,
    "rollout.refills": 10_000,
    "learner.inner_updates": 10_000,
    "learner.batch": 100_000,
    "lora.rank": 4096,
    "lora.alpha": 1e6,
    "eval.samples": 10_000,
    "eval.max_tokens": 10_000_000,
    "stop.grace_s": _DAYS_12,
    "rewards.weight": 1e6,
    "rewards.timeout_s": _DAYS_12,
    "epochs": 10_000,
    "data.pairs_per_prompt": 10_000,
    "data.args.size": 1_000_000,
    "iterate.weight": 1e6,
    "iterate.rounds": 10_000,
    "iterate.prompts": 100_000,
    "iterate.first_prompts": 100_000,
    "iterate.completions": 100_000,
    "iterate.pairs_per_prompt": 10_000,
    "iterate.epochs": 10_000,
    "iterate.first_epochs": 10_000,
}
"""By the setting's name in a recipe."""


def problem(name: str, value: int | float) -> str:
    """What is wrong with a number's size, or nothing; ``name`` is dotted, with positions in lists: rewards[0].weight.

    inf and nan are left to the rules, which say what the setting is about.

    >>> problem("threads", 100_000)
    'threads: got 100000, accepts at most 1,024'
    >>> problem("rewards[1].weight", -0.5)
    ''
    """
    most = MOST.get(re.sub(r"\[\d+\]", "", name), WHOLE if isinstance(value, int) else NUMBER)
    if value != value or abs(value) in (float("inf"), 0.0) or abs(value) <= most:
        return ""
    accepts = f"at least -{most:,.0f}" if value < 0 else f"at most {most:,.0f}"
    return f"{name}: got {value!r}, accepts {accepts}"


def problems(settings: Any, where: str = "") -> list[str]:
    """Every number of a dataclass of settings, and of those inside it, that is too large."""
    return [found for name, value in _numbers(settings, where) if (found := problem(name, value))]


def refuse(settings: Any, *, found: Sequence[str] = ()) -> None:
    """ConfigError where a number is too large, with the problems ``found`` before."""
    if too_large := problems(settings):
        raise ConfigError([*found, *too_large])


def _numbers(settings: Any, where: str) -> Iterator[tuple[str, int | float]]:
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{where}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, tuple):
            for i, inner in enumerate(value):
                if dataclasses.is_dataclass(inner):
                    yield from _numbers(inner, f"{name}[{i}].")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
