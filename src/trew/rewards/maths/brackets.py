"""Tokens between brackets: where a list of them is taken apart, and whether one pair encloses them all."""

from __future__ import annotations

from .not_exact import TooLarge
from .tokens import Token

MAX_ITEMS = 200


def split(tokens: list[Token], marks: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """The parts between ``marks`` outside of brackets, and the marks; brackets may be of different kinds: (1,2]."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        if token.text in ("(", "[", "{", "\\{") or token.text == "\\begin{matrix}":
            depth += 1
        elif token.text in (")", "]", "}", "\\}") or token.text == "\\end{matrix}":
            depth -= 1
        # Below 0 too: brackets that open backwards, as in ]1, 2[, close before they open.
        if depth <= 0 and token.text in marks:
            parts.append([])
            found.append(token.text)
        else:
            parts[-1].append(token)
    if len(parts) > MAX_ITEMS:
        raise TooLarge("too many parts")
    return parts, found


def encloses(tokens: list[Token]) -> bool:
    """Whether the first bracket closes at the last token, so that nothing stands outside of it."""
    depth = 0
    for i, token in enumerate(tokens):
        if token.text in ("(", "[", "{", "\\{"):
            depth += 1
        elif token.text in (")", "]", "}", "\\}"):
            depth -= 1
            if depth == 0 and i < len(tokens) - 1:  # (1)(2): the first bracket closes before the end
                return False
    return True
