"""Splits the computation of one optimizer step over several processes ("ranks")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..errors import NumericsError


@runtime_checkable
class Parallel(Protocol):
    """The ranks of a run, seen from one of them.

    All ranks hold the same weights, samples and batch, and call the same methods in the same order: each computes its
    share of the packs, and sums over ranks make the result equal on all of them. Denominators and token weights refer
    to the whole step, so gradients are summed, never averaged.
    """

    rank: int  # of this process, from 0
    size: int  # how many there are

    def mine(self, costs: Sequence[int]) -> list[int]:
        """Indices, in order, of the items with these costs that this rank computes. Each item goes to exactly one rank,
        and all ranks compute the same assignment without communicating."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces every tensor by its sum over all ranks, bit-identical on each. Shapes and dtypes are the same on
        all ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of each rank, in rank order; anything that JSON can represent."""
        ...


class Solo:
    """A single process."""

    rank, size = 0, 1

    def mine(self, costs: Sequence[int]) -> list[int]:
        """All items."""
        return list(range(len(costs)))

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors unchanged."""

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


def deal(costs: Sequence[int], size: int) -> list[list[int]]:
    """Assigns items to ``size`` ranks: the costliest (in tokens) first, each to the rank with the least load so far.

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    # Greedy, longest first: within 4/3 of the best possible maximum (Graham 1969).
    ranks: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):  # stable: ties go by position on every rank
        least = loads.index(min(loads))
        ranks[least].append(item)
        loads[least] += costs[item]
    return [sorted(items) for items in ranks]


@contextmanager
def failing_together(parallel: Parallel) -> Iterator[None]:
    """Raises a NumericsError of one rank on all ranks; otherwise the others would wait forever in the next sum."""
    own: NumericsError | None = None
    try:
        yield
    except NumericsError as error:
        own = error
    found = parallel.gather(own and own.to_json())
    if own is not None:
        raise own
    for other in found:
        if other is not None:
            raise NumericsError.from_json(other)
