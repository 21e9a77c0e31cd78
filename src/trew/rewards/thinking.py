"""Separates the answer of a completion from its thinking."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def after_thinking(completion: str, *, thinking: bool = False) -> str | None:
    """Returns the part of ``completion`` that may hold an answer; None if its thinking was not finished.

    Only the text after the last ``</think>`` counts. Without one the whole text counts, unless the prompt had already
    opened a thought (``thinking``) or the text itself opens one: then there is no answer.

    >>> after_thinking("<think>maybe 7</think> 8")
    ' 8'
    >>> after_thinking("8"), after_thinking("8", thinking=True), after_thinking("<think> 8")
    ('8', None, None)
    """
    # The last one: a thought may itself quote the tag, and a guess within it must not be read as the answer.
    end = completion.rfind(CLOSE)
    rest = completion if end < 0 else completion[end + len(CLOSE) :]
    unfinished = OPEN in rest or (thinking and end < 0)
    return None if unfinished else rest
