"""Functions with exact values: trigonometry at multiples of 15 degrees, logarithms, roundings, binomials."""

from __future__ import annotations

import math
from fractions import Fraction

from . import algebra, monomials
from .algebra import Value
from .not_exact import NotExact, TooLarge, Undefined

_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "arcarcsin": "sin"}


def apply(name: str, argument: Value, base: Value | None = None) -> Value:
    r"""The function ``name`` of ``argument``; ``base`` is that of a logarithm. What has no simple value stays as it is.

    >>> third = algebra.divide(algebra.thing(algebra.PI), algebra.number(3))
    >>> algebra.rational(apply("cos", third)), apply("sin", algebra.variable("x")).opaque
    (Fraction(1, 2), True)
    """
    name = _ALIASES.get(name, name)
    if name in ("ln", "log", "lg"):
        return _logarithm(name, argument, base)
    if base is not None:
        raise NotExact(f"{name} with an index")
    if name == "exp":
        return algebra.power(algebra.thing(algebra.E), argument)
    # Multiples of π/12 have values in square roots; other arguments stay as they are, and decide nothing.
    turn = algebra.rational(algebra.divide(argument, algebra.thing(algebra.PI)))
    if turn is not None and name in ("sin", "cos", "tan", "cot", "sec", "csc"):
        found = _trigonometric(name, turn)
        if found is not None:
            return found
    return algebra.function(name, argument)


def power(base: Value, exponent: Value) -> Value:
    r"""base ^ exponent, with e^{iπ/3} and its like in exact numbers.

    >>> i, pi = algebra.thing(algebra.I), algebra.thing(algebra.PI)
    >>> algebra.rational(power(algebra.thing(algebra.E), algebra.multiply(i, pi)))
    Fraction(-1, 1)
    """
    # Euler's formula: e^{i x} = cos x + i sin x.
    if base.above == {((algebra.E, Fraction(1)),): 1} and algebra.I in {g for mono in exponent.above for g, _ in mono}:
        turn = algebra.divide(exponent, algebra.multiply(algebra.thing(algebra.I), algebra.thing(algebra.PI)))
        twelfths = algebra.rational(algebra.multiply(turn, algebra.number(12)))
        if twelfths is not None and twelfths.denominator == 1:
            k = int(twelfths)
            return algebra.add(_sine(k + 6), algebra.multiply(algebra.thing(algebra.I), _sine(k)))
    return algebra.power(base, exponent)


def _logarithm(name: str, argument: Value, base: Value | None) -> Value:
    if algebra.is_zero(argument):
        raise Undefined("the logarithm of 0")
    found = algebra.logarithm(argument)
    if base is not None:
        return algebra.divide(found, algebra.logarithm(base))
    if name == "ln":
        return found
    if name == "lg":
        return algebra.divide(found, algebra.logarithm(algebra.number(10)))
    return algebra.multiply(found, algebra.thing(("any", "log")))  # base 10 or e: an unknown factor


def _trigonometric(name: str, turn: Fraction) -> Value | None:
    """sin(turn · π) and its relatives, for multiples of 1/12."""
    twelfths = turn * 12
    if twelfths.denominator != 1:
        return None
    k = int(twelfths)
    sine, cosine = _sine(k), _sine(k + 6)
    above, below = {
        "sin": (sine, None),
        "cos": (cosine, None),
        "tan": (sine, cosine),
        "cot": (cosine, sine),
        "sec": (algebra.number(1), cosine),
        "csc": (algebra.number(1), sine),
    }[name]
    return above if below is None else algebra.divide(above, below)


def _sine(k: int) -> Value:
    """sin(k π / 12)."""
    k %= 24
    if k >= 12:  # sin(x + π) = -sin x, and sin(π - x) = sin x: only the first quadrant is needed
        return algebra.negative(_sine(k - 12))
    k = min(k, 12 - k)
    six, two, three = (algebra.root(algebra.number(n), 2) for n in (6, 2, 3))
    if k in (1, 5):
        found = algebra.subtract(six, two) if k == 1 else algebra.add(six, two)
        return algebra.divide(found, algebra.number(4))
    halves = {0: algebra.number(0), 2: algebra.number(1), 3: two, 4: three, 6: algebra.number(2)}
    return algebra.divide(halves[k], algebra.number(2))


def absolute(a: Value) -> Value:
    """|a|: of numbers, positive constants and complex numbers exactly."""
    n = algebra.rational(a)
    if n is not None:
        return algebra.number(abs(n))
    if len(a.above) == len(a.below) == 1:
        [(mono, c)] = a.above.items()
        if all(g[0] in ("prime", "pi", "e") for g, _ in mono) and a.below == {monomials.ONE: Fraction(1)}:
            return a if c > 0 else algebra.negative(a)
    return _modulus(a) or algebra.function("abs", a)


def _modulus(a: Value) -> Value | None:
    """|x + iy| of a sum of constants in which i occurs, |3 + 4i|; None for another value."""
    one = {monomials.ONE: Fraction(1)}
    if a.below != one or any(g[0] not in ("prime", "pi", "e") and g != algebra.I for mono in a.above for g, _ in mono):
        return None
    imaginary = {mono: c for mono, c in a.above.items() if algebra.I in {g for g, _ in mono}}
    if not imaginary:
        return None
    y = algebra.divide(Value(imaginary, one), algebra.thing(algebra.I))
    x = algebra.subtract(a, Value(imaginary, one))
    if algebra.I in {g for mono in y.above for g, _ in mono}:
        return None
    return algebra.root(algebra.add(algebra.multiply(x, x), algebra.multiply(y, y)), 2)


def rounded(a: Value, how: str) -> Value:
    """floor or ceil of a number."""
    n = algebra.rational(a)
    if n is None:
        return algebra.function(how, a)
    return algebra.number(math.floor(n) if how == "floor" else math.ceil(n))


def binomial(above: Value, below: Value) -> Value:
    """n over k, for whole numbers."""
    n, k = algebra.rational(above), algebra.rational(below)
    if n is None or k is None or n.denominator != 1 or k.denominator != 1:
        return algebra.function("binomial", above, below)
    if n < 0 or k < 0:
        raise NotExact("a binomial coefficient of negative numbers")
    if n > 5000:  # the number of its digits grows with n
        raise TooLarge("a very large binomial coefficient")
    return algebra.number(math.comb(int(n), int(k)))
