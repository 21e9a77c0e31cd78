"""The environment of episodes.py, in a file of its own: the processes of episodes need nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trew.env.protocol import Episode


def answers(row: Mapping[str, Any], seed: int, *, seconds: float, turns: int) -> Episode:
    """Begins with the prompt, and answers each reply shortly after some time."""
    said: Any = [dict(message) for message in row["prompt"]]
    for _ in range(turns):
        yield said
        time.sleep(seconds)
        said = "higher"
    return 1.0
