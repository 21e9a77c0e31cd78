r"""Names that an answer gives to its value: x, x_1, f(x), (x, y), \text{area}, P(A)."""

from __future__ import annotations

import re

from .tokens import FUNCTIONS, Token

# v_{\text{avg}}, x_{\max}, S_{\triangle ABC}, V_{P-ABC}; but a_{n+1} = 2n is no value of a_n and stays an equation
_INDEX = r"(?:[A-Za-z0-9]+|\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Z]-[A-Z]+)"
_SINGLE = rf"(?:[A-Za-z]|\\[A-Za-z]+)'?(?:_(?:\{{{_INDEX}\}}|[A-Za-z0-9]+|\\(?:max|min)))?"
_ARGUMENT = rf"(?:{_SINGLE}|-?[0-9.]+)"
_FUNCTION = rf"{_SINGLE}(?:\^(?:\{{-1\}}|-1)(?=\())?(?:\({_ARGUMENT}(?:,{_ARGUMENT})*\))?"
# P(X = 1), E[X], Var(X), the length |AB|, |S|, |z|, the vector's |{a}|, the area [ABC], \tan\theta
_MEASURED = (
    r"(?:P|\\text\{[A-Za-z]{2,4}\})\([^()]+\)|[ED]\[[A-Z]\]|\|(?:[A-Z]{1,2}|z|\{[A-Za-z]{1,2}\})\||\[[A-Z]{3,4}\]"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\(?\\(?!pi|frac|sqrt)[a-z]+\)?"
)
_NAME = re.compile(rf"{_FUNCTION}|\({_SINGLE}(?:,{_SINGLE})+\)|[A-Z]{{2,3}}|{_MEASURED}")
_OF_NUMBER = re.compile(r"([^(^]*)(?:\^[^(]*)?\([^)]*[0-9][^)]*\)")  # f(2); but sin(2) is a value
_NO_NAMES = ("\\pi", "\\infty", "\\sqrt", "\\frac", "e", "i")  # values, unless they name a function or a side of =


def name_of(tokens: list[Token]) -> str:
    """The name that tokens spell, x, x_1, f(x), (x, y), \\text{area}, \\angle ABC, P(A); empty when it is none."""
    if len(tokens) > 12 or not tokens:
        return ""
    written = "".join(t.text for t in tokens)
    if _is_in_words(tokens):
        return written
    if tokens[0].text in _NO_NAMES and not re.search("[=(]", written[1:]):
        return ""
    if tokens[0].text.lstrip("\\") in FUNCTIONS and not any(t.kind in ("word", "command") for t in tokens[1:]):
        return ""  # log_2 8 is a value
    applied = _OF_NUMBER.fullmatch(written)
    if applied and (applied[1] in ("e", "i", "\\pi") or applied[1].lstrip("\\") in FUNCTIONS):
        return ""
    long_word = len(tokens) == 1 and tokens[0].kind == "word" and len(written) > 3  # area = 5
    return written if long_word or _NAME.fullmatch(written) else ""


def _is_in_words(tokens: list[Token]) -> bool:
    """Whether the tokens are upright text, or name an angle or a triangle."""
    if all(t.kind in ("text", "unit") for t in tokens) or tokens[0].text in ("\\angle", "\\triangle"):
        return True
    return [t.text for t in tokens[:2]] == ["m", "\\angle"]  # the measure of the angle
