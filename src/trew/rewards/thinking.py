"""Which part of a completion is the answer and which is thought."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def after_thinking(completion: str, *, thinking: bool = False) -> str | None:
    """The part of ``completion`` that may hold an answer; None when a thought was begun and not finished.

    Only what follows the last ``</think>`` is read. Without one, the whole text is read, unless ``thinking`` says
    that the prompt had already opened a thought, or the text itself opens one: then nothing was answered.

    >>> after_thinking("<think>maybe 7</think> 8")
    ' 8'
    >>> after_thinking("8"), after_thinking("8", thinking=True), after_thinking("<think> 8")
    ('8', None, None)
    """
    end = completion.rfind(CLOSE)
    rest = completion if end < 0 else completion[end + len(CLOSE) :]
    unfinished = OPEN in rest or (thinking and end < 0)
    return None if unfinished else rest
