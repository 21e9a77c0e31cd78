"""The names of a run's rewards, from their settings alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def names_of(rewards: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which a run knows its rewards: a function in a file goes by the part behind the colon, a model
    without a name by its folder's, and the second of a name is ``name_2``.

    >>> names_of([{"name": "math"}, {"name": "my.py:f"}, {"model": "org/nice-rm"}, {"name": "math"}])
    ['math', 'f', 'nice-rm', 'math_2']
    """
    names: list[str] = []
    taken: Counter[str] = Counter()
    for reward in rewards:
        name, model = str(reward.get("name") or ""), str(reward.get("model") or "")
        own = name.rpartition(":")[2] or model.rstrip("/").rpartition("/")[2]
        taken[own] += 1
        names.append(own if taken[own] == 1 else f"{own}_{taken[own]}")
    return names
