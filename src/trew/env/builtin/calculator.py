"""``calculator``: state a problem in a calculator's language, and report its answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ...rewards.builtin.expression import ExpressionError, evaluate, tokenize
from ..protocol import Episode, Say

CALL = re.compile(r"\s*calc:(.*)", re.DOTALL)
NUMBER = re.compile(r"-?\d{1,30}")


def calculator(row: Mapping[str, Any], seed: int, *, largest: int = 99, turns: int = 3) -> Episode:
    """The policy adds a number to the product of two others, all from 10 to ``largest``: too hard in its head.

    A reply ``calc: 12 * 34 + 56`` asks a calculator, which answers with the value or with "error: ...". Any other
    reply is the answer. A right answer within ``turns`` replies earns 1, anything else 0.
    """
    if largest < 10:
        raise ValueError(f"largest: got {largest}, accepts a whole number of at least 10")
    rng = random.Random(seed)
    a, b, c = (rng.randint(10, largest) for _ in range(3))
    reply = yield Say(_opening(a, b, c))
    for calls in range(turns):
        asked = CALL.match(reply.text)
        if asked is None:
            return {"reward": float(_number(reply.text) == a * b + c), "calls": calls}
        # Nobody would read the calculator's answer to the last reply.
        if calls < turns - 1:
            reply = yield _value(asked[1])
    return {"reward": 0.0, "calls": turns}


def _value(expression: str) -> str:
    try:
        value = evaluate(tokenize(expression.strip()))
    except ExpressionError as error:
        return f"error: {error}"
    if value.denominator == 1:
        return str(value)
    try:
        return str(float(value))
    except OverflowError:
        return "error: the value is too large"


def _number(text: str) -> Fraction | None:
    found = NUMBER.search(text.replace(",", ""))
    return Fraction(found[0]) if found else None


def _opening(a: int, b: int, c: int) -> tuple[dict[str, str], ...]:
    # The example shows the calculator's language. Without one, the default model never uses it.
    said = [
        ("user", "Add 56 to the product of 12 and 34."),
        ("assistant", "calc: 12 * 34 + 56"),
        ("user", "464"),
        ("assistant", "464"),
        ("user", f"Add {c} to the product of {a} and {b}."),
    ]
    return tuple({"role": role, "content": content} for role, content in said)
