"""Built-in reward ``gsm8k``: grade school mathematics, where the final answer is one number."""

from __future__ import annotations

from typing import Any, Literal

from .. import numbers
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong

MARK = "####"


def extract_strict(text: str) -> str | None:
    """Returns the rest of the line after the last ``####``, or the next non-empty line; None without a ``####``.

    >>> extract_strict("#### 3? No.\\n#### 72\\nBecause ...")
    '72'
    """
    _, mark, rest = text.rpartition(MARK)
    rest = rest.strip()
    return rest.splitlines()[0].strip() if mark and rest else None


def grade(
    completion: str, gold: Any, *, mode: Literal["strict", "flexible"] = "strict", thinking: bool = False
) -> Verdict:
    """Scores 1 if the completion's final answer equals ``gold`` as an exact number, else 0.

    ``mode="strict"`` reads the text after the last ``####``, which must state exactly one number; ``"flexible"`` reads
    the last number of the completion. ``thinking`` says that the prompt has already opened a thought. A gold that is
    not exactly one number is ``bad_gold``.

    >>> grade("12*6 = 72\\n#### $72.00", "72").score, grade("So 72.", 72, mode="flexible").score
    (1.0, 1.0)
    >>> grade("72", "72").detail
    'no ####'
    """
    # The gold first: a broken row is reported as such, whatever the model wrote.
    target = numbers.parse_gold(gold)
    if target is None:
        return bad_gold("the gold answer is not exactly one number")
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    if mode == "strict":
        answer = extract_strict(text)
        if answer is None:
            return no_answer("nothing after ####" if MARK in text else "no ####")
        reading = numbers.single_number(answer)
    else:
        reading = numbers.last_number(text)
        answer = reading.text
    if reading.value is None:
        return no_answer(reading.why, extracted=answer or None)
    return right_or_wrong(reading.value == target, extracted=answer)


def self_answer(gold: Any) -> str:
    """Writes a completion that answers with ``gold``: a worked solution as it is, anything else after ``####``."""
    return gold if isinstance(gold, str) and MARK in gold else f"{MARK} {gold}"
