"""Groups and reward files for the tests of rewards."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from trew.types import Completion, Group, Prompt


def completion(text: str, *, tokens: int | None = None) -> Completion:
    n = len(text) if tokens is None else tokens
    zeros = np.zeros(n, np.float32)
    return Completion(np.arange(n), np.ones(n, bool), zeros, zeros, zeros, text, "stop", 0)


def group(*texts: str, uid: str = "q1", chat: bool = False, **columns: object) -> Group:
    if chat:
        prompt = Prompt(uid, messages=({"role": "user", "content": "question"},), columns=columns)
    else:
        prompt = Prompt(uid, text="question", columns=columns)
    return Group(prompt, np.arange(3), tuple(map(completion, texts)))


def write(folder: Path, source: str, name: str = "my_rewards.py") -> str:
    """Writes a reward file and returns its path, to which ``:function`` is added."""
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)
