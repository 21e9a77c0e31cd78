r"""Normalised LaTeX and plain formulas as tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .algebra import Malformed, TooLarge

_FUNCTIONS = "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot asin acos atan ln log lg exp sqrt"
_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell
"""
_SHORT_WORDS = """
    yes no odd one two six ten red all any max min sun mon tue wed thu fri sat tie cat dog up down left right
    ann amy bob dan eve jim joe kim leo max mia roy sam sue ted tim tom zoe none nan dne
"""
FUNCTIONS, NAMES, SHORT_WORDS = (frozenset(words.split()) for words in (_FUNCTIONS, _NAMES, _SHORT_WORDS))
MAX_TOKENS = 1000
MAX_DIGITS = 1000

_TOKEN = re.compile(
    r"""(?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\s*\{?\d{1,50}\}?)
    |(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?)
    |(?P<text>\\text\{[^{}]*\})
    |(?P<matrix>\\(?:begin|end)\{[A-Za-z]+\})
    |(?P<command>\\[A-Za-z]+)
    |(?P<newline>\\\\)
    |(?P<brace>\\[{}])
    |(?P<word>[A-Za-z]+)
    |(?P<mark>[-+*/^_!=<>,;:&|'"()\[\]{}])""",
    re.VERBOSE,
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)")


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is number, repeating, text, matrix, command, newline, brace, word or mark; ``space``: white space
    stands before it."""

    kind: str
    text: str
    space: bool


def tokenize(text: str, *, groups: bool = True) -> list[Token]:
    r"""The tokens of ``text``; raises Malformed for a character that has no meaning here.

    With ``groups`` a number such as 1,234 outside of brackets is one number, else it is two with a comma.

    >>> [t.text for t in tokenize(r"2\frac12 x_1")], [t.text for t in tokenize("1,234, (1,234)")]
    (['2', '\\frac', '1', '2', 'x', '_', '1'], ['1234', ',', '(', '1', ',', '234', ')'])
    """
    out: list[Token] = []
    at = depth = 0
    while at < len(text):
        space = text[at].isspace()
        if space:
            at += 1
            continue
        space = at > 0 and text[at - 1].isspace()
        if groups and depth == 0 and text[at].isdigit() and (match := _GROUPED.match(text, at)) and text[at] != "0":
            out.append(Token("number", match.group().replace(",", ""), space))
            at = match.end()
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            raise Malformed(f"{text[at]!r} has no meaning here")
        kind, token = match.lastgroup or "", match.group()
        if kind == "number" and _is_single(out, token):
            token = token[0]
        if token in ("(", "[", "{", "\\{"):
            depth += 1
        elif token in (")", "]", "}", "\\}"):
            depth -= 1
        if len(token) > MAX_DIGITS and kind == "number":
            raise TooLarge("a number of too many digits")
        out.append(Token(kind, token, space))
        at += len(token)
        if len(out) > MAX_TOKENS:
            raise TooLarge("too long")
    return out


def _is_single(out: list[Token], token: str) -> bool:
    """Whether TeX would take one digit only: the arguments of \\frac and \\sqrt without braces."""
    if not out or len(token) == 1:
        return False
    if out[-1].text == "\\frac":
        return True
    return _second_of_fraction(out)


def _second_of_fraction(out: list[Token]) -> bool:
    """Whether the next token is the second argument of a ``\\frac`` whose first was a single digit or a group."""
    if len(out) >= 2 and out[-2].text == "\\frac" and out[-1].kind == "number" and len(out[-1].text) == 1:
        return True
    if out[-1].text != "}":
        return False
    depth = 0
    for i in range(len(out) - 1, max(-1, len(out) - 200), -1):
        depth += {"}": 1, "{": -1}.get(out[i].text, 0)
        if depth == 0:
            return i > 0 and out[i - 1].text == "\\frac"
    return False
