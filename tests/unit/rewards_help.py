"""Groups and reward files for the tests of rewards."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rollouts_help import rollout
from trew.types import Group, Prompt, Rollout


def completion(text: str, *, tokens: int | None = None) -> Rollout:
    return rollout(len(text) if tokens is None else tokens, text=text)


def group(*texts: str, uid: str = "q1", chat: bool = False, **columns: object) -> Group:
    if chat:
        prompt = Prompt(uid, messages=({"role": "user", "content": "question"},), columns=columns)
    else:
        prompt = Prompt(uid, text="question", columns=columns)
    return Group(prompt, tuple(map(completion, texts)))


def write(folder: Path, source: str, name: str = "my_rewards.py") -> str:
    """Writes a reward file and returns its path, to which ``:function`` is added."""
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)
