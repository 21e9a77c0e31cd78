"""Exact algebra: quotients of sums of products of named things, with rational numbers in front.

The things (generators) are variables, units, words, π, e, i, roots of primes, logarithms of primes, powers with
symbolic exponents such as 2^n, and functions such as sin(x) as they stand. Products of different roots of primes are
linearly independent, so that a sum of them is 0 only if it is written as 0; the same holds with variables and π next to
them. Two values without functions in them are therefore equal exactly when their difference cancels: that is a decision
and no approximation. Where functions occur (``opaque``), a difference that does not cancel decides nothing.

Everything is bounded: terms, digits, and steps (``allowance``). What is larger raises TooLarge.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from . import monomials
from .monomials import MAX_POWER, ONE, Generator, I, Monomial, Terms
from .not_exact import NotExact, TooLarge, Undefined
from .primes import prime_powers

MAX_TERMS = 400
MAX_BITS = 60_000  # of one coefficient
MAX_WORK = 40_000  # term products per answer

PI: Generator = ("pi",)
E: Generator = ("e",)
OPAQUE = frozenset({"function", "root", "power", "any"})  # kinds of generators between which hidden relations may hold


_work = threading.local()


def allowance(products: int = MAX_WORK) -> None:
    """Starts the count of steps again: ``products`` of two terms, or as much work with longer numbers."""
    _work.left = products


def _spend(products: int) -> None:
    _work.left = getattr(_work, "left", MAX_WORK) - products
    if _work.left < 0:
        raise TooLarge("too much to compute")


@dataclass(frozen=True, slots=True)
class Value:
    """``above / below``, each a sum of terms. Not reduced: compare with ``same``, not with ``==``."""

    above: Terms
    below: Terms

    @property
    def opaque(self) -> bool:
        """Whether something occurs in it that may be equal to something else in ways this algebra does not know."""
        return any(is_opaque(g) for terms in (self.above, self.below) for mono in terms for g, _ in mono)

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables in it, those inside functions and exponents included."""
        return self.named("variable")

    def named(self, *kinds: str) -> frozenset[str]:
        """The names of all things of these kinds in it."""
        return frozenset(
            n for terms in (self.above, self.below) for mono in terms for g, _ in mono for n in names(g, kinds)
        )


def number(value: Fraction | int) -> Value:
    """A rational number."""
    return Value({ONE: Fraction(value)} if value else {}, {ONE: Fraction(1)})


def thing(generator: Generator, power: Fraction | int = 1) -> Value:
    """One generator to a power."""
    return Value(*monomials.tidied_terms({((generator, Fraction(power)),): Fraction(1)}))


def variable(name: str) -> Value:
    """The unknown ``name``."""
    return thing(("variable", name))


def rational(value: Value) -> Fraction | None:
    """The number that ``value`` is, where it is one.

    >>> rational(divide(number(6), number(4))), rational(thing(PI))
    (Fraction(3, 2), None)
    """
    if not value.above:
        return Fraction(0)
    # A number over a number.
    if set(value.above) == set(value.below) == {ONE}:
        return value.above[ONE] / value.below[ONE]
    # A multiple of what is below: (2x + 2) / (x + 1) is 2.
    if value.above.keys() == value.below.keys():
        ratios = {value.above[mono] / value.below[mono] for mono in value.above}
        return ratios.pop() if len(ratios) == 1 else None
    return None


def add(a: Value, b: Value) -> Value:
    """a + b."""
    if a.below == b.below:
        return Value(_sum(a.above, b.above), a.below)
    # a/b + c/d = (ad + cb) / (bd)
    above = _sum(_product(a.above, b.below), _product(b.above, a.below))
    return _fraction(above, _product(a.below, b.below))


def negative(a: Value) -> Value:
    """-a."""
    return Value({mono: -c for mono, c in a.above.items()}, a.below)


def subtract(a: Value, b: Value) -> Value:
    """a - b."""
    return add(a, negative(b))


def multiply(a: Value, b: Value) -> Value:
    """a · b."""
    return _fraction(_product(a.above, b.above), _product(a.below, b.below))


def divide(a: Value, b: Value) -> Value:
    """a / b; raises Undefined for b = 0.

    >>> divide(number(1), number(0))
    Traceback (most recent call last):
        ...
    trew.rewards.maths.not_exact.Undefined: a division by zero
    """
    if not b.above:
        raise Undefined("a division by zero")
    return _fraction(_product(a.above, b.below), _product(a.below, b.above))


def is_zero(a: Value) -> bool:
    """Whether everything in ``a`` cancels."""
    return not a.above


def same(a: Value, b: Value) -> bool | None:
    """Whether a = b; None if that cannot be decided because functions occur.

    >>> half = divide(number(1), root(number(2), 2)); same(half, divide(root(number(2), 2), number(2)))
    True
    """
    # Equal forms need no work; else a/b = c/d is decided as ad - cb = 0.
    if a.above == b.above and a.below == b.below:
        return True
    if not _sum(_product(a.above, b.below), _product(b.above, a.below), -1):
        return True
    return None if a.opaque or b.opaque else False


def power(base: Value, exponent: Value) -> Value:
    """base ^ exponent; raises Undefined for 0 ^ -1, TooLarge for what would not fit, NotExact for 0 ^ 0."""
    n = rational(exponent)
    if n is None:
        return _symbolic_power(base, exponent)
    if n.denominator == 1:
        return _whole_power(base, int(n))
    if n.denominator > 64 or abs(n.numerator) > MAX_POWER:
        raise TooLarge("a root of a very high degree")
    # b^(p/q) = (b^(1/q))^p
    return _whole_power(root(base, n.denominator, principal=True), n.numerator)


def root(base: Value, degree: int, *, principal: bool = False) -> Value:
    """The ``degree``-th root: real for real numbers if there is one; with ``principal`` that of a negative number
    to an odd degree is left as it stands, since ``(-8)^{1/3}`` means different things to different people.

    >>> same(multiply(root(number(2), 2), root(number(6), 2)), multiply(number(2), root(number(3), 2)))
    True
    >>> rational(root(number(-8), 3)), rational(root(number(Fraction(4, 9)), 2))
    (Fraction(-2, 1), Fraction(2, 3))
    """
    if not 1 <= degree <= 64:
        raise TooLarge("a root of a very high degree")
    if degree == 1 or not base.above:
        return base
    n = rational(base)
    found = _root_of_term(base, degree, principal) if n is None else _root_of_number(n, degree, principal)
    return found if found is not None else thing(("root", degree, key(base)))


def _root_of_term(base: Value, degree: int, principal: bool) -> Value | None:
    """The root of one term c x^e: the root of c, times x^(e / degree) or x^e under a root; None for other values."""
    if len(base.above) != 1 or len(base.below) != 1:
        return None
    [(mono, c)] = base.above.items()
    [(low, d)] = base.below.items()
    # Only positive constants come out of a root: sqrt(-a) is not sqrt(-1) sqrt(a) for a negative a.
    if c / d <= 0 or low != ONE or not _is_plain(mono):
        return None
    outer = _root_of_number(c / d, degree, principal)
    if outer is None:
        return None
    return multiply(outer, Value(*monomials.tidied_terms({tuple((g, e / degree) for g, e in mono): Fraction(1)})))


def function(name: str, *arguments: Value) -> Value:
    """A function of arguments as it stands; equal only to itself."""
    return thing(("function", name, *(key(a) for a in arguments)))


def logarithm(a: Value) -> Value:
    """The natural logarithm: of positive rational numbers as a sum over primes, of powers of e exactly.

    >>> rational(divide(logarithm(number(8)), logarithm(number(2))))
    Fraction(3, 1)
    """
    n = rational(a)
    if n is not None and n > 0 and (primes := prime_powers(n)) is not None:
        # log Π p^k = Σ k log p
        total = number(0)
        for p, count in primes:
            total = add(total, multiply(number(count), thing(("log", p))))
        return total
    lone = _lone_generator(a)
    return number(lone[1]) if lone is not None and lone[0] == E else function("log", a)


def key(a: Value) -> tuple[Any, ...]:
    """A hashable name of the value; equal names mean equal values (not the other way round)."""
    if a.below == {ONE: Fraction(1)}:
        return (tuple(sorted(a.above.items(), key=repr)), ())
    # By one coefficient of the denominator, so that multiples of above and below have one name.
    lead = a.below[min(a.below, key=repr)]
    above = {m: c / lead for m, c in a.above.items()}
    below = {m: c / lead for m, c in a.below.items()}
    return (tuple(sorted(above.items(), key=repr)), tuple(sorted(below.items(), key=repr)))


@lru_cache(maxsize=1024)
def is_opaque(generator: Generator) -> bool:
    """Whether relations with other generators may be hidden in this one."""
    if generator[0] == "power":  # 2^n and x^n are independent of everything else; (x+1)^n and e^(iπ) are not
        _, base, mono = generator
        return base[0] not in ("prime", "e", "variable") or any(
            g[0] not in ("variable", "pi") or (g[0] == "pi" and len(mono) == 1) for g, _ in mono
        )
    return generator[0] in OPAQUE


@lru_cache(maxsize=1024)
def names(generator: Any, kinds: tuple[str, ...]) -> frozenset[str]:
    """The names of the things of some kinds inside a generator, found by walking through its parts."""
    found: set[str] = set()
    stack = [generator]
    while stack:
        part = stack.pop()
        if isinstance(part, tuple):
            if len(part) == 2 and part[0] in kinds:
                found.add(part[1])
            else:
                stack.extend(part)
    return frozenset(found)


# ---------------------------------------------------------------------------------------------------------- inside


def _sum(a: Terms, b: Terms, sign: int = 1) -> Terms:
    out = dict(a)
    for mono, c in b.items():
        total = out.get(mono, 0) + sign * c
        if total:
            out[mono] = Fraction(total)
        else:
            # A term that cancels is taken out: a sum of nothing is 0.
            out.pop(mono, None)
    if len(out) > MAX_TERMS:
        raise TooLarge("too many terms")
    return out


def _product(a: Terms, b: Terms) -> Terms:
    # A product counts as one step, and as more where coefficients are so long that their product is slow.
    _spend(len(a) * len(b) * (1 + (_bits(a) * _bits(b) >> 20)))
    # A constant only changes coefficients: no terms to collect.
    for constant, other in ((b, a), (a, b)):
        if len(constant) == 1 and ONE in constant:
            return _multiple(other, constant[ONE])
    out: Terms = {}
    for left, c in a.items():
        for right, d in b.items():
            factor, mono = monomials.product(left, right)
            total = out.get(mono, 0) + c * d * factor
            if total:
                out[mono] = _checked(Fraction(total))
            else:  # a term without a coefficient would make equal sums differ
                out.pop(mono, None)
    if len(out) > MAX_TERMS:
        raise TooLarge("too many terms")
    return out


def _multiple(terms: Terms, c: Fraction) -> Terms:
    return terms if c == 1 else {mono: _checked(c * d) for mono, d in terms.items()}


def _bits(terms: Terms) -> int:
    return max((max(c.numerator.bit_length(), c.denominator.bit_length()) for c in terms.values()), default=0)


def _checked(c: Fraction) -> Fraction:
    if c.numerator.bit_length() > MAX_BITS or c.denominator.bit_length() > MAX_BITS:
        raise TooLarge("too many digits")
    return c


def _fraction(above: Terms, below: Terms) -> Value:
    """A quotient; one whose denominator is a single term is multiplied out, so that common ones have one form."""
    if not above:
        return number(0)
    if len(below) == 1:
        [(mono, c)] = below.items()
        if mono == ONE:
            if c != 1:
                above = {m: _checked(d / c) for m, d in above.items()}
            return Value(above, {ONE: Fraction(1)})
        inverse = Value(*monomials.tidied_terms({tuple((g, -e) for g, e in mono): 1 / c}))
        return Value(_product(above, inverse.above), {ONE: Fraction(1)})
    return Value(above, below)


def _whole_power(base: Value, n: int) -> Value:
    if n == 0:
        if not base.above:
            raise NotExact("0 to the power 0")
        return number(1)
    if n < 0:
        return _whole_power(divide(number(1), base), -n)
    if n > MAX_POWER:
        # Any power of 0, 1 and -1 is known: only odd and even differ.
        if rational(base) in (0, 1, -1):
            return base if n % 2 else multiply(base, base)
        raise TooLarge("a very high power")
    _refuse_high_power(base, n)
    # The exponents of a single term are multiplied; a sum is multiplied out, by squaring.
    if len(base.above) == len(base.below) == 1:
        return divide(_term_power(base.above, n), _term_power(base.below, n))
    return _by_squaring(base, n)


def _refuse_high_power(base: Value, n: int) -> None:
    """Raises TooLarge before a power is computed: a coefficient's digits, and a sum's terms, grow with it."""
    for terms in (base.above, base.below):
        # A coefficient of b bits is at least 2^(b - 1), so that its power has at least (b - 1) n bits.
        if (_bits(terms) - 1) * n > MAX_BITS or (len(terms) > 1 and n > 64):
            raise TooLarge("a very high power")


def _term_power(term: Terms, n: int) -> Value:
    [(mono, c)] = term.items()
    return Value(*monomials.tidied_terms({tuple((g, e * n) for g, e in mono): c**n}))


def _by_squaring(base: Value, n: int) -> Value:
    out = number(1)
    while n:
        if n & 1:
            out = multiply(out, base)
        n >>= 1
        if n:  # the last square would be made for nothing, and is the largest
            base = multiply(base, base)
    return out


def _symbolic_power(base: Value, exponent: Value) -> Value:
    """b^(c0 + c1 m1 + …) = b^c0 · (b^m1)^c1 …: one generator per base and monomial of the exponent."""
    generators = _positive_base(base)
    # Other powers stay as they stand, and decide nothing.
    if generators is None or exponent.below != {ONE: Fraction(1)} or len(exponent.above) > 20:
        return thing(("any", key(base), key(exponent)))
    out = number(1)
    for generator, count in generators:
        out = multiply(out, _generator_power(generator, exponent, count))
    return out


def _positive_base(base: Value) -> list[tuple[Generator, int]] | None:
    """A base as a product of generators to whole powers, so that a power of it is the product of theirs; None where
    that does not hold (0, negative numbers, sums), or its primes are not found. 1 is the empty product."""
    n = rational(base)
    if n is not None:
        primes = prime_powers(n) if n > 0 else None
        return None if primes is None else [(("prime", p), count) for p, count in primes]
    lone = _lone_generator(base)
    if lone is None or lone[1] != 1 or lone[0][0] not in ("variable", "e"):
        return None
    return [(lone[0], 1)]


def _lone_generator(a: Value) -> tuple[Generator, Fraction] | None:
    """The generator and its exponent, where ``a`` is one generator to a power and nothing else."""
    if a.below != {ONE: Fraction(1)} or len(a.above) != 1:
        return None
    [(mono, c)] = a.above.items()
    return mono[0] if c == 1 and len(mono) == 1 else None


def _generator_power(base: Generator, exponent: Value, times: int) -> Value:
    out = number(1)
    for mono, c in exponent.above.items():
        piece = thing(base, c * times) if mono == ONE else thing(("power", base, mono), c * times)
        out = multiply(out, piece)
    return out


def _is_plain(mono: Monomial) -> bool:
    """Whether a root goes through the monomial whatever its variables stand for: positive constants, one variable."""
    signed = [e for g, e in mono if g[0] not in ("prime", "pi", "e", "unit")]
    return not signed or (len(signed) == 1 and signed[0] == 1 and mono_has_variable(mono))


def mono_has_variable(mono: Monomial) -> bool:
    """Whether the only thing in it that may be negative is a variable."""
    return all(g[0] in ("prime", "pi", "e", "variable") for g, _ in mono)


def _root_of_number(n: Fraction, degree: int, principal: bool) -> Value | None:
    if n < 0:
        # √-n is i√n; an odd root of -n is minus that of n, unless it stays as it stands; other even roots stay too.
        positive = _root_of_number(-n, degree, principal)
        if positive is None or (degree != 2 and (degree % 2 == 0 or principal)):
            return None
        return multiply(positive, thing(I)) if degree == 2 else negative(positive)
    primes = prime_powers(n)
    if primes is None:
        return None
    factor, mono = monomials.tidied({("prime", p): Fraction(count, degree) for p, count in primes})
    return Value({mono: factor}, {ONE: Fraction(1)})
