"""Built-in rewards on a completion's tokens regardless of their meaning: length penalties and a repetition penalty."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..verdict import Verdict


def soft_overlong(length: int, *, max_completion_len: int, soft_punish_cache: int) -> float:
    """Computes DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in tokens.

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
    """Grades with ``soft_overlong``; ignores ``completion`` and ``gold``."""
    value = soft_overlong(length, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache)
    return Verdict(value, "scored", None, f"{length} tokens")


def cosine(
    length: int,
    *,
    correct: bool,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> float:
    """Computes the cosine length reward (arXiv 2502.03373, appendix C.1), in tokens; constant beyond ``max_len``.

    With t = min(``length`` / ``max_len``, 1), from ``a`` for the shortest to ``b`` for the longest completion::

        b + (a - b) (1 + cos(π t)) / 2,   (a, b) = (max_value_correct, min_value_correct) for a right answer,
                                                   (min_value_wrong, max_value_wrong) for a wrong one

    A right answer is worth more the shorter it is; a wrong one costs more the shorter it is.

    >>> [round(cosine(n, correct=True, max_len=100), 4) for n in (0, 25, 50, 100, 150)]
    [1.0, 0.9268, 0.75, 0.5, 0.5]
    >>> [round(cosine(n, correct=False, max_len=100), 4) for n in (0, 25, 50, 100, 150)]
    [-1.0, -0.9268, -0.75, -0.5, -0.5]
    """
    # The order flips for wrong answers: a short one costs more, which encourages longer thinking on hard problems.
    if correct:
        shortest, longest = max_value_correct, min_value_correct
    else:
        shortest, longest = min_value_wrong, max_value_wrong
    part = min(length / max_len, 1.0)
    return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(part * math.pi))


def grade_cosine(
    completion: str, gold: Any = None, *, length: int, correct: bool, max_len: int, **values: float
) -> Verdict:
    """Grades with ``cosine``; ignores ``completion`` and ``gold``."""
    value = cosine(length, correct=correct, max_len=max_len, **values)
    return Verdict(value, "scored", None, f"{'right' if correct else 'wrong'}, {length} tokens")


def repeated_share(token_ids: Sequence[int], *, ngram_size: int, turn_lengths: Sequence[int] | None = None) -> float:
    """Returns the share of token n-grams that occurred before: 1 - distinct / all; 0 if there is no n-gram.

    ``turn_lengths`` are the numbers of tokens that each turn of an episode has; None: all are of one turn. What an
    environment said between two turns separates their tokens, so that an n-gram lies within one turn.

    >>> repeated_share([1, 2, 1, 2, 1, 2], ngram_size=2), repeated_share([1, 2, 3], ngram_size=4)
    (0.6, 0.0)
    >>> repeated_share([1, 2, 1, 2], ngram_size=2, turn_lengths=[2, 2])
    0.5
    """
    ids = [int(token) for token in token_ids]
    ends = list(itertools.accumulate([len(ids)] if turn_lengths is None else turn_lengths))
    different: set[tuple[int, ...]] = set()
    total = 0
    for start, end in itertools.pairwise([0, *ends]):
        count = max(end - start - ngram_size + 1, 0)
        total += count
        # ids shifted by 0 … n - 1, zipped: one tuple per n-gram.
        shifted = (ids[start + i : start + i + count] for i in range(ngram_size if count else 0))
        different.update(zip(*shifted, strict=True))
    return 1.0 - len(different) / total if total else 0.0


def grade_repetition(
    completion: str,
    gold: Any = None,
    *,
    token_ids: Sequence[int],
    turn_lengths: Sequence[int] | None = None,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
) -> Verdict:
    """Penalises repeated n-grams by up to ``max_penalty`` (arXiv 2502.03373, appendix C.2, as in open-r1 and TRL).

    The value is -|max_penalty| times ``repeated_share``, so 1 and -1 mean the same. N-grams are of tokens.

    >>> grade_repetition("", token_ids=[1, 2, 1, 2, 1, 2], ngram_size=2, max_penalty=-0.5).score
    -0.3
    """
    share = repeated_share(token_ids, ngram_size=ngram_size, turn_lengths=turn_lengths)
    return Verdict(
        -abs(max_penalty) * share if share else 0.0, "scored", None, f"{share:.1%} of {ngram_size}-grams repeat"
    )
