"""Random numbers as pure functions of a key, in plain integers.

Procedural tasks draw from here, so that a seed gives the same problems on every machine and with every version of
every library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = 2**64 - 1
_ROUNDS = 6  # of the Feistel network: enough to mix domains of only a few dozen values


def mix(x: int) -> int:
    """The splitmix64 finaliser: a bijection on 64-bit integers with full avalanche.

    >>> mix(0), mix(1) != mix(2)
    (0, True)
    """
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def key_of(*parts: int | str) -> int:
    """A 64-bit key from integers and strings; different parts give unrelated keys."""
    # The type and a separator that names do not hold: 1 and "1", or ("a", "bc") and ("ab", "c"), must not collide. Not
    # hash(): Python salts it for each process.
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class Draws:
    """A stream of uniform integers under one key.

    >>> a, b = Draws("dice", 7), Draws("dice", 7)
    >>> [a.below(6) for _ in range(5)] == [b.below(6) for _ in range(5)]
    True
    """

    def __init__(self, *key: int | str):
        self._state = key_of(*key)

    def below(self, n: int) -> int:
        """A uniform integer from 0 to n - 1, for 1 <= n <= 2**63. Rejection sampling avoids modulo bias."""
        # The largest multiple of n: values from there on would favour small remainders.
        limit = (2**64 // n) * n
        while True:
            # splitmix64: the state steps by the golden ratio of 2**64, which is odd, so that its period is 2**64.
            self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
            value = mix(self._state)
            if value < limit:
                return value % n

    def between(self, low: int, high: int) -> int:
        """A uniform integer from low to high, inclusive."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]


class Permutation:
    """A pseudo-random permutation of 0 .. size - 1 in constant memory.

    A Feistel network permutes the next power of four; indices are mapped again until they land in the domain (cycle
    walking).

    >>> sorted(Permutation(10, "any key")(i) for i in range(10)) == list(range(10))
    True
    """

    def __init__(self, size: int, *key: int | str):
        self.size = size
        # Bits of one half. Both halves are equal, so the network covers less than four times the domain, and a cycle
        # walk takes fewer than four passes on average.
        self._half = max(1, -(-(size - 1).bit_length() // 2))
        self._keys = [key_of(*key, "round", r) for r in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in 0 .. {self.size - 1}")
        low = (1 << self._half) - 1
        while True:  # terminates: a permutation's cycle through the domain returns to the domain
            left, right = index >> self._half, index & low
            for key in self._keys:
                # (left, right) -> (right, left ^ f(right)): can be undone whatever f is, and so permutes.
                left, right = right, left ^ (mix(right + key) & low)
            index = (left << self._half) | right
            if index < self.size:
                return index
