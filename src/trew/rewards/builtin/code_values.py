"""Compares values that come back from the sandbox, as typed JSON, the way Python's ``==`` would.

Values are never rebuilt as the objects they describe, and nothing in them is executed: two values are equal exactly if
their canonical texts are. So a program cannot return a value that compares slowly or that overrides equality.
"""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SLACK, _FACTOR = 1 << 16, 16  # a value whose text is longer than _SLACK + _FACTOR times the expected one is not parsed
_fresh = itertools.count()  # makes unique texts for values that equal nothing, such as nan


def wire(value: Any) -> Any:
    """Writes a literal in the wire form, as ``sandbox/inside.py`` does; raises ValueError for other values.

    >>> wire((1, [2.5, "a"], {3: None})), wire(2**70)
    (['t', 1, ['l', 2.5, 'a'], ['d', 3, None]], ['i', '400000000000000000'])
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in (int, float):
        return _wire_number(value)
    if kind is complex:
        return ["c", repr(value.real), repr(value.imag)]
    if kind is bytes:
        return ["b", value.hex()]
    if kind is dict:
        return ["d", *(wire(part) for pair in value.items() for part in pair)]
    marks = {list: "l", tuple: "t", set: "s", frozenset: "z"}
    if kind not in marks:
        raise ValueError(f"{kind.__name__} is no literal")
    return [marks[kind], *map(wire, value)]


def _wire_number(value: int | float) -> Any:
    if isinstance(value, int):
        # In hexadecimal beyond 2**53: decimal conversion takes quadratic time, and Python limits it to 4300 digits.
        return value if -(2**53) < value < 2**53 else ["i", f"{value:x}"]
    return value if value - value == 0 else ["f", repr(value)]  # the difference is nan for inf and nan


def equal(line: bytes, expected: Any) -> bool:
    """Returns whether the value on ``line`` equals the literal ``expected``.

    >>> equal(b'["l",1,2.0]', [True, 2]), equal(b'["t",1,2]', [1, 2]), equal(b'["o","Always"]', 3)
    (True, False, False)
    """
    goal = wire(expected)
    if len(line) > _SLACK + _FACTOR * len(json.dumps(goal)):
        return False
    try:
        return canonical(json.loads(line)) == canonical(goal)
    except Exception:  # a program can write anything there; what cannot be read equals nothing
        return False


def is_same(line: bytes, expected: Any) -> bool:
    """Returns whether the value on ``line`` is ``expected``: None, True or False."""
    # By text, because 1 == True: canonical texts would not tell them apart.
    return line.strip() == json.dumps(expected).encode()


def is_true(line: bytes) -> bool:
    """Returns whether the value on ``line`` is truthy; an object of the program's own classes is.

    >>> is_true(b'["l"]'), is_true(b"0.0"), is_true(b'["f","nan"]'), is_true(b'["o","Match"]')
    (False, False, True, True)
    >>> is_true(b'["R",0,0,1]'), is_true(b'["R",0,3,1]')
    (False, True)
    """
    try:
        value = json.loads(line)
        if not isinstance(value, list):
            return bool(value)
        # Objects of the program, iterators and types: all truthy.
        if value[0] in ("o", "g", "y"):
            return True
        if value[0] in ("l", "t", "s", "z", "d", "q", "K", "V", "I"):
            return len(value) > 1
        if value[0] == "R":
            return bool(range(*(int(part[1], 16) if isinstance(part, list) else part for part in value[1:])))
        # What is left is a number or bytes: false if 0 or empty, which a long text is not.
        return len(line) > _SLACK or canonical(value) not in ("#0/1", "b")
    except Exception:
        return False


def canonical(value: Any) -> str:
    """Returns a text that two values share exactly if they are equal; raises ValueError or similar for malformed ones.

    >>> canonical(["s", 1, True, 1.0]) == canonical(["z", 1]), canonical(["f", "nan"]) == canonical(["f", "nan"])
    (True, False)
    """
    if value is None:
        return "None"
    # As fractions, because Python compares int and float exactly: 2**53 + 1 != float(2**53).
    if isinstance(value, (bool, int, float)):
        return _number(Fraction(value))
    if isinstance(value, str):
        return json.dumps(value)
    mark, *rest = value
    if mark in ("l", "t", "q"):
        return mark + "(" + ",".join(map(canonical, rest)) + ")"
    # As a set of texts: members that are equal, as 1 and True, count once. A table's keys and items equal sets.
    if mark in ("s", "z", "K", "I"):
        return "s(" + ",".join(sorted({canonical(part) for part in rest})) + ")"
    if mark == "d":
        # Of equal keys the later one wins, as in Python.
        pairs = {canonical(key): canonical(item) for key, item in zip(rest[::2], rest[1::2], strict=True)}
        return "d(" + ",".join(f"{key}:{pairs[key]}" for key in sorted(pairs)) + ")"
    return _canonical_scalar(mark, rest)


def _canonical_scalar(mark: Any, rest: list[Any]) -> str:
    if mark in ("b", "B"):
        return "b" + rest[0]
    if mark == "i":
        return _number(Fraction(int(rest[0], 16)))
    if mark in ("f", "c", "D", "F"):
        return _other_number(mark, rest)
    return f"?{next(_fresh)}"  # an object of the program's own class equals nothing


def _number(value: Fraction) -> str:
    return f"#{value.numerator:x}/{value.denominator:x}"


def _other_number(mark: str, rest: list[Any]) -> str:
    if mark == "c":
        real, imaginary = (canonical(_finite(float(part))) for part in rest)
        # complex(2, 0) == 2 in Python.
        return real if imaginary == "#0/1" else f"c({real},{imaginary})"
    if mark == "F":
        over, _, under = rest[0].partition("/")  # not Fraction(text), which would also compute 1e999999999
        return _number(Fraction(int(over), int(under or "1")))
    if mark == "D":
        exact = Decimal(rest[0])
        if exact.is_finite() and abs(exact.adjusted()) <= 400:  # a larger exponent makes an enormous fraction
            return _number(Fraction(exact))
        rest = [str(exact).lower().replace("infinity", "inf")]
    return f"#{rest[0]}" if rest[0] in ("inf", "-inf") else f"?{next(_fresh)}"


def _finite(value: float) -> Any:
    return value if value - value == 0 else ["f", repr(value)]
