"""Bounded factoring: what roots and logarithms of whole numbers are made of."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

TRIAL = 20_000  # largest trial divisor
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)  # decide primality below _CERTAIN
_CERTAIN = 3_317_044_064_679_887_385_961_981
MAX_FACTORED_BITS = 4096


@lru_cache(maxsize=4096)
def factored(n: int) -> tuple[tuple[int, int], ...] | None:
    """The prime powers of ``n`` >= 1 in order; None if they are not found in bounded time.

    >>> factored(360), factored(1), factored((2**61 - 1) * (2**31 - 1))
    (((2, 3), (3, 2), (5, 1)), (), None)
    """
    if n.bit_length() > MAX_FACTORED_BITS:
        return None
    found: list[tuple[int, int]] = []
    rest = n
    for p in _small_primes():
        if p * p > rest:
            break
        count = 0
        while rest % p == 0:
            rest //= p
            count += 1
        if count:
            found.append((p, count))
    if rest == 1:
        return tuple(found)
    if rest < TRIAL * TRIAL:  # trial division has tried every possible factor
        return (*found, (rest, 1))
    last = _prime_power(rest)
    return None if last is None else (*found, last)


def _prime_power(n: int) -> tuple[int, int] | None:
    """The prime and its power that ``n`` is; None for a product of different primes, and for higher powers."""
    for power in (1, 2, 3, 5, 7):
        # A float root is exact enough below 900 bits; the check below rejects a rounded one.
        base = round(n ** (1 / power)) if n.bit_length() < 900 else 0
        base = math.isqrt(n) if power == 2 else n if power == 1 else base
        if base**power == n and is_prime(base):
            return base, power
    return None


def prime_powers(n: Fraction) -> list[tuple[int, int]] | None:
    """The primes of a positive number with their exponents; None if they are not found in bounded time.

    >>> prime_powers(Fraction(8, 9))
    [(2, 3), (3, -2)]
    """
    above, below = factored(n.numerator), factored(n.denominator)
    if above is None or below is None:
        return None
    return [*above, *((p, -count) for p, count in below)]


@lru_cache(maxsize=1)
def _small_primes() -> tuple[int, ...]:
    sieve = bytearray([1]) * TRIAL
    sieve[:2] = b"\0\0"
    for p in range(2, math.isqrt(TRIAL) + 1):
        if sieve[p]:
            sieve[p * p :: p] = bytes(len(range(p * p, TRIAL, p)))
    return tuple(i for i, flag in enumerate(sieve) if flag)


def is_prime(n: int) -> bool:
    """Whether ``n`` is certainly prime; beyond 3.3e24, where this cannot be said quickly, False.

    >>> [is_prime(n) for n in (2, 91, 2**61 - 1)]
    [True, False, True]
    """
    if n < 2 or n >= _CERTAIN:
        return False
    if any(n % p == 0 for p in _BASES):
        return n in _BASES
    # Miller and Rabin: n - 1 = odd * 2^twos. A prime has base^odd = 1, or -1 after some squaring.
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    for base in _BASES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
