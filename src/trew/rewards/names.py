"""The names of a run's rewards, from their settings alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHAPES = frozenset({"format", "soft_overlong", "cosine", "repetition"})
"""Built-in kinds that look at a completion's layout or length, and say nothing about its answer."""


def judge_rank(*, name: str, model: bool, gate: bool, weight: float) -> tuple[bool, bool, bool]:
    """Orders rewards by whether they say which completions are correct: the one with the least rank does, the first of
    equals. A reward model's score has no value that means "correct", a layout or a length none either, and a gate of
    weight 0 is a condition for the others.

    >>> gate, answer = {"name": "format", "gate": True, "weight": 0.0}, {"name": "math", "gate": False, "weight": 1.0}
    >>> min((gate, answer), key=lambda reward: judge_rank(model=False, **reward))["name"]
    'math'
    """
    return model, not model and name in SHAPES, gate and weight == 0


def names_of(rewards: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which a run knows its rewards: a function in a file goes by the part behind the colon, a model
    without a name by its folder's, and the second of a name is ``name_2``.

    >>> names_of([{"name": "math"}, {"name": "my.py:f"}, {"model": "org/nice-rm"}, {"name": "math"}])
    ['math', 'f', 'nice-rm', 'math_2']
    """
    own = []
    for reward in rewards:
        name, model = str(reward.get("name") or ""), str(reward.get("model") or "")
        own.append(name.rpartition(":")[2] or model.rstrip("/").rpartition("/")[2])
    return numbered(own)


def numbered(names: Iterable[str]) -> list[str]:
    """The names, each once: the second of a name is ``name_2``, or has the next number that is free.

    >>> numbered(["f", "f", "f"]), numbered(["f", "f_2", "f"]), numbered(["f", "f", "f_2"])
    (['f', 'f_2', 'f_3'], ['f', 'f_2', 'f_3'], ['f', 'f_2', 'f_2_2'])
    """
    made: list[str] = []
    for name in names:
        numbers = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        made.append(next(free for free in numbers if free not in made))
    return made
