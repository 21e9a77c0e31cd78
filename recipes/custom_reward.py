"""Two reward functions for recipes/custom_reward.toml. The signature is TRL's, so they work there as well.

A function is called once per step with all completions, and returns one number for each, or None for "does not apply".
Columns of the data (here ``answer``) arrive as lists with one entry per completion; ``args`` of the recipe as keywords.
"""

from __future__ import annotations

import re
from typing import Any


def brief(completions: list[Any], *, characters: int, **columns: Any) -> list[float]:
    """1 up to ``characters`` characters, then falling; reaches 0 at three times as many."""
    lengths = [len(text_of(completion)) for completion in completions]
    return [min(max((3 * characters - n) / (2 * characters), 0.0), 1.0) for n in lengths]


def close(completions: list[Any], *, answer: list[str], **columns: Any) -> list[float | None]:
    """1 for the right number, less the further off the last number is; None where the gold is no whole number."""
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        found = re.findall(r"-?\d{1,6}", text_of(completion))
        if not re.fullmatch(r"-?\d+", gold):
            scores.append(None)
        else:
            scores.append(1 / (1 + abs(int(found[-1]) - int(gold))) if found else 0.0)
    return scores


def text_of(completion: Any) -> str:
    """Completions of chat prompts are a list with one message, those of text prompts are strings."""
    return completion if isinstance(completion, str) else completion[0]["content"]
