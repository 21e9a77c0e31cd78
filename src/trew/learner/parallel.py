"""``Parallel``: splits the computation of one optimizer step over several processes ("ranks")."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Parallel(Protocol):
    """The ranks of a run, seen from one of them.

    All ranks hold the same weights, samples and batch, and call the same methods in the same order: each computes its
    share of the packs, and sums over ranks make the result equal on all of them. Denominators and token weights refer
    to the whole step, so gradients are summed, never averaged.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def beat(self) -> None:
        """Says that this rank makes progress; whoever watches for ranks that hang is content."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, this rank may wait for another one as long as that takes, without progress of its own."""
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

    def beat(self) -> None:
        """Nobody watches."""

    def waiting(self) -> AbstractContextManager[None]:
        """There is nobody to wait for."""
        return nullcontext()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors unchanged."""

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]
