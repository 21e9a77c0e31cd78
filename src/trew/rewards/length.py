"""Rewards that look at a completion's length alone."""

from __future__ import annotations

from typing import Any

from .verdict import Verdict


def soft_overlong(length: int, *, max_completion_len: int, soft_punish_cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in tokens.

    With L = ``length``, M = ``max_completion_len``, C = ``soft_punish_cache``::

        0 for L <= M - C,   ((M - C) - L) / C for M - C < L <= M,   -1 beyond

    >>> [soft_overlong(n, max_completion_len=20480, soft_punish_cache=4096) for n in (16384, 17408, 20480, 20481)]
    [0.0, -0.25, -1.0, -1.0]
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    return max((free - length) / soft_punish_cache, -1.0)


def grade_soft_overlong(
    completion: str, gold: Any = None, *, length: int, max_completion_len: int, soft_punish_cache: int
) -> Verdict:
    """``soft_overlong`` as a reward; ``completion`` and ``gold`` are not looked at."""
    value = soft_overlong(length, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache)
    return Verdict(value, "scored", None, f"{length} tokens")
