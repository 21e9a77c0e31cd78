"""Answers in boxes, where gold answers and those of completions are read by the same rules."""

from __future__ import annotations

import re

# The command itself: not one that merely begins like it.
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# a box with its brace, or around the number or letter that follows; any other command; a brace
_PIECE = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[-+]?\.?\d[^\s{}$\\]*|(?<=\s)[A-Za-z](?=\s*(?:[$.,}]|$))))|\\.|[{}]", re.DOTALL
)


def last_box(text: str) -> str | None:
    r"""What the last complete ``\boxed{…}`` (or ``\fbox{…}``, or ``\boxed 7``) holds, braces balanced, or None.

    Of boxes inside each other the outer one counts. A box that is never closed is none. One pass over the text.

    >>> last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    >>> last_box(r"\boxed{\left\{ 1 \right.} }")
    '\\left\\{ 1 \\right.'
    """
    first = _BOX.search(text)
    if first is None:
        return None
    best: tuple[int, int] | None = None
    open_at: list[tuple[int, int] | None] = []  # of every open brace: a box's start and the start of what it holds
    for piece in _PIECE.finditer(text, first.start()):
        token = piece.group()
        if token == "{":
            open_at.append(None)
        elif token == "}":
            # A brace that nothing has opened is left alone.
            box = open_at.pop() if open_at else None
            if box is not None:
                best = (box[1], piece.start())
        elif piece["bare"]:
            best = piece.span("bare")
        elif token.endswith("{") and len(token) > 2:
            # The brace of a box: an escaped one, "\{", has two characters.
            open_at.append(piece.span())
    return None if best is None else text[best[0] : best[1]]
