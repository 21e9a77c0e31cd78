"""Built-in reward ``arithmetic``: the last number of the reply must be the result."""

from __future__ import annotations

from typing import Any

from .. import numbers
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong


def grade(completion: str, gold: Any, *, thinking: bool = False) -> Verdict:
    """Scores 1 if the last number of the completion equals ``gold`` exactly, else 0.

    ``7 * 8 = 56`` answers 56. ``7 or 8``, ``7 * 8`` and ``8/2`` are no answers: a list, a range or a repeated problem
    is not a result, whatever its last number is.

    >>> grade("7 * 8 = 56", 56).score, grade("7 or 8", 8).status, grade("8/2", "4").status
    (1.0, 'no_answer', 'no_answer')
    """
    target = numbers.parse_gold(gold)
    if target is None:
        return bad_gold("the gold answer is not exactly one number")
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    reading = numbers.last_number(text)
    if reading.value is None:
        return no_answer(reading.why, extracted=reading.text or None)
    # 8/2 would equal a gold of 4, but repeating the problem must not earn the reward.
    if "/" in reading.text:
        return no_answer("a division that was not worked out", extracted=reading.text)
    return right_or_wrong(reading.value == target, extracted=reading.text)


def self_answer(gold: Any) -> str:
    """Writes a completion that answers with ``gold``, or with the text after the last ``####`` of a worked solution."""
    return str(gold).rpartition("####")[2].strip()
