"""Rows for environments that make their own problems: they differ by a number, and so by the environment's seed."""

from __future__ import annotations

from ..types import Prompt
from .load import Dataset
from .split import fingerprint


def numbered_episodes(count: int, *, eval_size: int) -> Dataset:
    """``count`` episodes to train on and ``eval_size`` others to evaluate on; the column ``episode`` has the number.

    >>> data = numbered_episodes(3, eval_size=2)
    >>> [prompt.uid for prompt in (*data.train, *data.eval)]
    ['episode-0', 'episode-1', 'episode-2', 'held-out-0', 'held-out-1']
    """
    train = [_episode("episode", number) for number in range(count)]
    held_out = [_episode("held-out", number) for number in range(eval_size)]
    return Dataset(train, held_out, (), [], fingerprint(train, held_out))


def _episode(kind: str, number: int) -> Prompt:
    # A prompt must say something; what the policy reads is the environment's opening.
    return Prompt(f"{kind}-{number}", text=f"{kind} {number}", columns={"episode": number})
