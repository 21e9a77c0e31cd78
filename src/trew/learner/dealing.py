"""Deals the work of a step over ranks, and keeps them in step: equal results, or one error on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from ..errors import NumericsError, RankError
from .parallel import Parallel


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


def rounds(costs: Sequence[int], parallel: Parallel) -> list[tuple[int | None, list[int]]]:
    """Assigns items to ranks and orders them in rounds, in which each rank computes at most one: this rank's item (None
    where it has none left), and the items of all ranks. Equal on all ranks without communication.

    >>> from trew.learner import Solo
    >>> rounds([5, 1, 4], Solo())
    [(0, [0]), (1, [1]), (2, [2])]
    """
    table = zip_longest(*deal(costs, parallel.size))
    return [(row[parallel.rank], [item for item in row if item is not None]) for row in table]


def agree(parallel: Parallel, facts: Mapping[str, Any]) -> None:
    """Raises RankError on all ranks, naming them, where ranks have different ``facts`` (anything JSON can represent).
    They compute the same step from the same data, so one of them is wrong, and nothing says which."""
    if parallel.size == 1:
        return
    found = parallel.gather(dict(facts))
    for name in facts:
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            values.setdefault(repr(one.get(name)), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on rank {', '.join(map(str, of))}" for value, of in values.items())
            raise RankError(
                f"ranks disagree on {name}: {said}. Nothing of this step was applied. They must run the same code on "
                "equal hardware; if they do, one of the machines computes wrongly: continue with --resume on others"
            )


@contextmanager
def failing_together(parallel: Parallel) -> Iterator[None]:
    """Raises a NumericsError of one rank on all ranks; otherwise the others would wait forever in the next sum."""
    own: NumericsError | None = None
    try:
        yield
    except NumericsError as error:
        own = error
    # All ranks gather, with or without an error: nobody knows of another's before.
    found = parallel.gather(own and own.to_json())
    if own is not None:
        raise own
    for other in found:
        if other is not None:
            raise NumericsError.from_json(other)
