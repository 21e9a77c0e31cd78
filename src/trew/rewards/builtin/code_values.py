"""Values that come back from the sandbox: JSON with types in it, compared as Python's ``==`` would compare them.

Nothing of a value is ever looked up in a hash table of ours and nothing of it is executed: two values are equal exactly
when their canonical texts are. So no value can be built that compares slowly, or that decides itself what it equals.
"""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SLACK, _FACTOR = 1 << 16, 16  # a value written longer than this, compared with what is expected, is not read at all
_fresh = itertools.count()  # for what equals nothing


def wire(value: Any) -> Any:
    """A literal in the form in which values travel (``sandbox/inside.py`` writes the same); ValueError for others.

    >>> wire((1, [2.5, "a"], {3: None})), wire(2**70)
    (['t', 1, ['l', 2.5, 'a'], ['d', 3, None]], ['i', '400000000000000000'])
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**53) < value < 2**53 else ["i", f"{value:x}"]
    if kind is float:
        return value if value - value == 0 else ["f", repr(value)]
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


def equal(line: bytes, expected: Any) -> bool:
    """Whether the value that was written as ``line`` equals the literal ``expected``.

    >>> equal(b'["l",1,2.0]', [True, 2]), equal(b'["t",1,2]', [1, 2]), equal(b'["o","Always"]', 3)
    (True, False, False)
    """
    goal = wire(expected)
    if len(line) > _SLACK + _FACTOR * len(json.dumps(goal)):
        return False
    try:
        return canonical(json.loads(line)) == canonical(goal)
    except Exception:  # a program can write anything there: whatever cannot be read equals nothing
        return False


def is_same(line: bytes, expected: Any) -> bool:
    """``is`` for None, True and False."""
    return line.strip() == json.dumps(expected).encode()


def is_true(line: bytes) -> bool:
    """Whether the value counts as true; an object of a class of the program's own does.

    >>> is_true(b'["l"]'), is_true(b"0.0"), is_true(b'["f","nan"]'), is_true(b'["o","Match"]')
    (False, False, True, True)
    """
    try:
        value = json.loads(line)
        if not isinstance(value, list):
            return bool(value)
        if value[0] in ("o", "g", "y"):
            return True
        if value[0] in ("l", "t", "s", "z", "d", "q"):
            return len(value) > 1
        return len(line) > _SLACK or canonical(value) not in ("#0/1", "b")
    except Exception:
        return False


def canonical(value: Any) -> str:
    """The text that values have in common exactly when they are equal; raises ValueError and its like for nonsense.

    >>> canonical(["s", 1, True, 1.0]) == canonical(["z", 1]), canonical(["f", "nan"]) == canonical(["f", "nan"])
    (True, False)
    """
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float)):
        return _number(Fraction(value))
    if isinstance(value, str):
        return json.dumps(value)
    mark, *rest = value
    if mark in ("l", "t", "q"):
        return mark + "(" + ",".join(map(canonical, rest)) + ")"
    if mark in ("s", "z"):
        return "s(" + ",".join(sorted({canonical(part) for part in rest})) + ")"
    if mark == "d":
        pairs = {canonical(key): canonical(item) for key, item in zip(rest[::2], rest[1::2], strict=True)}
        return "d(" + ",".join(f"{key}:{pairs[key]}" for key in sorted(pairs)) + ")"
    if mark in ("b", "B"):
        return "b" + rest[0]
    if mark == "i":
        return _number(Fraction(int(rest[0], 16)))
    if mark in ("f", "c", "D", "F"):
        return _other_number(mark, rest)
    return f"?{next(_fresh)}"


def _number(value: Fraction) -> str:
    return f"#{value.numerator:x}/{value.denominator:x}"


def _other_number(mark: str, rest: list[Any]) -> str:
    if mark == "c":
        real, imaginary = (canonical(_finite(float(part))) for part in rest)
        return real if imaginary == "#0/1" else f"c({real},{imaginary})"
    if mark == "F":
        over, _, under = rest[0].partition("/")  # not Fraction(text): that would also work out 1e999999999
        return _number(Fraction(int(over), int(under or "1")))
    if mark == "D":
        exact = Decimal(rest[0])
        if exact.is_finite() and abs(exact.adjusted()) <= 400:  # as a fraction, a larger one is enormous
            return _number(Fraction(exact))
        rest = [str(exact).lower().replace("infinity", "inf")]
    return f"#{rest[0]}" if rest[0] in ("inf", "-inf") else f"?{next(_fresh)}"


def _finite(value: float) -> Any:
    return value if value - value == 0 else ["f", repr(value)]
