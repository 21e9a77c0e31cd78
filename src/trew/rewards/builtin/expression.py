"""Evaluates arithmetic expressions over exact fractions with a stack, without ``eval`` or recursion; + - * / ( ) only.

Time is linear in the text. Numbers stay small because callers bound the operands before anything is computed.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

MAX_LENGTH = 2000  # characters
MAX_OPERANDS = 100
_TOKEN = re.compile(r"[ \t\r\n]*(?:([0-9]{1,30})|([-+*/()]))")  # not \d, which matches digits of all scripts
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "pos": 3}


class ExpressionError(ValueError):
    """The text is not an expression of + - * / ( ) and whole numbers, or has no value; the message says why."""


def tokenize(text: str) -> list[str]:
    """Splits ``text`` into whole numbers and the characters ``+-*/()``; raises ExpressionError for anything else.

    >>> tokenize("(12 + 3)*4")
    ['(', '12', '+', '3', ')', '*', '4']
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    text = text.rstrip()
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text[at:].lstrip()[:1]!r} is not one of 0-9 + - * / ( )")
        tokens.append(match.group(1) or match.group(2))
        # Also catches a number of more than 30 digits, which the pattern cuts in two.
        if tokens[-1].isdigit() and tokens[-2:-1] and tokens[-2].isdigit():
            raise ExpressionError("two numbers without an operator between them")
        at = match.end()
    # ** and // would otherwise be reported as a missing number.
    for previous, token in itertools.pairwise(tokens):
        if previous == token and token in "*/":
            raise ExpressionError(f"{token * 2!r} is not an operator here")
    if not tokens:
        raise ExpressionError("empty")
    return tokens


def operands(tokens: list[str]) -> list[int]:
    """Returns the numbers among ``tokens``, in order.

    >>> operands(tokenize("8*2 - 1"))
    [8, 2, 1]
    """
    return [int(token) for token in tokens if token.isdigit()]


def evaluate(tokens: list[str]) -> Fraction:
    """Evaluates ``tokens`` by the usual precedence, left to right; raises ExpressionError if malformed, or for x/0.

    >>> evaluate(tokenize("2 * (3 + 4) / 4")), evaluate(tokenize("-2 + 5 - 1"))
    (Fraction(7, 2), Fraction(2, 1))
    """
    if len(operands(tokens)) > MAX_OPERANDS:
        raise ExpressionError(f"more than {MAX_OPERANDS} numbers")
    # Dijkstra's shunting-yard algorithm, which applies operators instead of printing them.
    values: list[Fraction] = []
    pending: list[str] = []
    want_operand = True
    for token in tokens:
        if want_operand:
            want_operand = _take_operand(token, pending, values)
        elif token == ")":
            _close_bracket(pending, values)
        elif token in _PRECEDENCE:
            # >= makes operators of equal precedence left-associative; an opening bracket counts 0 and stops the loop.
            while pending and _PRECEDENCE.get(pending[-1], 0) >= _PRECEDENCE[token]:
                _apply(pending.pop(), values)
            pending.append(token)
            want_operand = True
        else:
            raise ExpressionError(f"an operator is missing before {token!r}")
    if want_operand:
        raise ExpressionError("ends in the middle")
    while pending:
        operator = pending.pop()
        if operator == "(":
            raise ExpressionError("'(' without ')'")
        _apply(operator, values)
    return values[0]


def _take_operand(token: str, pending: list[str], values: list[Fraction]) -> bool:
    """Takes a number, or a sign or bracket before one; returns whether an operand is still wanted."""
    if token.isdigit():
        values.append(Fraction(int(token)))
        return False
    if token not in "+-(":
        raise ExpressionError(f"a number is missing before {token!r}")
    # A sign where an operand belongs is unary; it binds tighter than * and /.
    pending.append({"+": "pos", "-": "neg"}.get(token, token))
    return True


def _close_bracket(pending: list[str], values: list[Fraction]) -> None:
    """Applies the operators pending since the last opening bracket, and removes that bracket."""
    while pending and pending[-1] != "(":
        _apply(pending.pop(), values)
    if not pending:
        raise ExpressionError("')' without '('")
    pending.pop()


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    if operator == "neg":
        values.append(-right)
    elif operator == "pos":
        values.append(right)
    elif operator == "+":
        values.append(values.pop() + right)
    elif operator == "-":
        values.append(values.pop() - right)
    elif operator == "*":
        values.append(values.pop() * right)
    elif right == 0:
        raise ExpressionError("divides by zero")
    else:
        values.append(values.pop() / right)
