"""Monomials: products of generators to rational powers, in one tidy form, so that equal products are equal tuples.

Tidy means: exponents of primes in [0, 1), of i 0 or 1, no whole power of a root, no exponent of 0, and one order. What
that takes out of a monomial is a rational number, which is returned with it.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

from .not_exact import TooLarge

MAX_POWER = 100_000

Generator = tuple[Any, ...]
Monomial = tuple[tuple[Generator, Fraction], ...]
Terms = dict[Monomial, Fraction]

ONE: Monomial = ()
I: Generator = ("i",)


def product(a: Monomial, b: Monomial) -> tuple[Fraction, Monomial]:
    """The product of two monomials: exponents added; whole powers of primes and of i go into the number in front."""
    if not a or not b:
        return Fraction(1), a or b
    exponents = dict(a)
    for g, e in b:
        exponents[g] = exponents.get(g, Fraction(0)) + e
    return tidied(exponents)


def tidied(exponents: dict[Generator, Fraction]) -> tuple[Fraction, Monomial]:
    """The tidy monomial, and the rational number that was taken out of it."""
    factor = Fraction(1)
    out = []
    for g, e in exponents.items():
        if g[0] == "root" and e.denominator == 1 and e >= g[1]:
            return _unrooted(exponents, g)
        number, rest = _number_in(g, e)
        factor *= number
        if rest:
            out.append((g, rest))
    out.sort(key=_order)
    return factor, tuple(out)


def _number_in(g: Generator, e: Fraction) -> tuple[Fraction, Fraction]:
    """The rational number in g^e, and the exponent without it: 2^(5/2) = 4 * 2^(1/2), i^3 = -1 * i^1."""
    if g[0] == "prime":
        # Rounded down, so that the exponent that is left lies in [0, 1), also for negative ones.
        whole = e.numerator // e.denominator
        if abs(whole) > MAX_POWER:
            raise TooLarge("too many digits")
        return Fraction(g[1]) ** whole, e - whole
    if g == I and e.denominator == 1:
        turn = int(e) % 4
        return Fraction(-1 if turn >= 2 else 1), Fraction(turn % 2)
    return Fraction(1), e


def _unrooted(exponents: dict[Generator, Fraction], g: Generator) -> tuple[Fraction, Monomial]:
    """sqrt(A)^2 is A; where A is a sum, the square stays as it stands (and decides nothing)."""
    above, below = g[2]
    # ``below`` is empty for the denominator 1 (algebra.key).
    if len(above) != 1 or below:
        return Fraction(1), tuple(sorted(exponents.items(), key=_order))
    [(mono, c)] = above
    rest = dict(exponents)
    rest[g] -= g[1]
    for inner, e in mono:
        rest[inner] = rest.get(inner, Fraction(0)) + e
    factor, tidy = tidied(rest)
    return factor * c, tidy


def _order(entry: tuple[Generator, Fraction]) -> str:
    return _name_of(entry[0])


@lru_cache(maxsize=8192)
def _name_of(generator: Generator) -> str:
    return repr(generator)


def tidied_terms(terms: Terms) -> tuple[Terms, Terms]:
    """Tidied terms over 1."""
    out: Terms = {}
    for mono, c in terms.items():
        factor, tidy = tidied(dict(mono))
        out[tidy] = out.get(tidy, Fraction(0)) + c * factor
    return {m: c for m, c in out.items() if c}, {ONE: Fraction(1)}
