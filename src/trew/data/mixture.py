"""Mixes several data sets by their weights: decides which set the next prompt comes from, without chance."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from fractions import Fraction

from ..types import Prompt

LONGEST_PERIOD = 1_000_000
"""A schedule that repeats after so many prompts or fewer is kept; a longer one grows with the run."""


class Schedule:
    """Which of several sets each place of an endless stream belongs to, by weights.

    After n places, set k of K with share w_k has had x_k of them, and |x_k - n w_k| <= 1 - 1 / (2K - 2): Tijdeman,
    "The chairman assignment problem", Discrete Mathematics 32 (1980), 323-330, whose rule this is. No schedule has a
    smaller bound for all weights. So any window that starts at the beginning has less than one prompt too many or too
    few of each set, and any other window less than two; for two sets at most one.

    >>> schedule = Schedule([1, 3])
    >>> [schedule.place(n) for n in range(5)]
    [(1, 0), (0, 0), (1, 1), (1, 2), (1, 3)]
    """

    def __init__(self, weights: Iterable[float]) -> None:
        # As decimals, the way they were written: 0.1 and 0.3 are 1 to 3, and so the schedule repeats after 4.
        parts = [Fraction(repr(weight)) for weight in weights]
        whole = math.lcm(*(part.denominator for part in parts))
        counts = [int(part * whole) for part in parts]
        common = math.gcd(*counts)
        self._counts = [count // common for count in counts]
        self._period = sum(self._counts)
        self._urgency = [math.lcm(*self._counts) // count for count in self._counts]  # 1 / share, in whole numbers
        self._chosen = array("L")  # the set at each place so far
        self._nth = array("L")  # how many places of that set are before it
        self._had = [0] * len(self._counts)

    @property
    def shares(self) -> list[Fraction]:
        """Each set's share of the places."""
        return [Fraction(count, self._period) for count in self._counts]

    def place(self, n: int) -> tuple[int, int]:
        """The set that place ``n`` belongs to, and how many of that set's places are before it."""
        rounds = 0
        if self._period <= LONGEST_PERIOD:
            rounds, n = divmod(n, self._period)  # after a period every set has had exactly its share
        while len(self._chosen) <= n:
            self._choose(len(self._chosen) + 1)
        chosen = self._chosen[n]
        return chosen, rounds * self._counts[chosen] + self._nth[n]

    def _choose(self, n: int) -> None:
        """Chooses the set of the n-th place, counted from 1: of those that are far enough behind their share, the one
        that would be the first to fall behind by more than the bound."""
        # All in multiples of 1 / (slack x period), so that no number is rounded.
        slack, period = max(2 * len(self._counts) - 2, 1), self._period
        behind = [slack * (n * count - had * period) for count, had in zip(self._counts, self._had, strict=True)]
        # Set k may have the n-th place only once it is due: n w_k - x_k is at least 1 / (2K - 2).
        ready = [k for k, value in enumerate(behind) if value >= period] or range(len(behind))
        most = (slack - 1) * period
        # How many places until the deficit would pass the bound 1 - 1 / (2K - 2), at w_k for each: the fewest come
        # first.
        chosen = min(ready, key=lambda k: ((most - behind[k]) * self._urgency[k], k))
        self._chosen.append(chosen)
        self._nth.append(self._had[chosen])
        self._had[chosen] += 1


def named(name: str, uid: str) -> str:
    """The uid of a prompt where there are several data sets: two of them may have the same uid.

    >>> named("gsm8k", "train:17"), Prompt("gsm8k/train:17", "?").data_set
    ('gsm8k/train:17', 'gsm8k')
    """
    return f"{name}/{uid}"


def by_set(prompts: Sequence[Prompt], names: Sequence[str]) -> dict[str, list[Prompt]]:
    """The prompts of each set, in their order."""
    found: dict[str, list[Prompt]] = {name: [] for name in names}
    for prompt in prompts:
        found[prompt.data_set].append(prompt)
    return found
