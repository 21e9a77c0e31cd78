"""``ResumingDecoder``: a decoder that keeps rows between the turns of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from .decoder import Decoder


@runtime_checkable
class ResumingDecoder(Decoder, Protocol):
    """A decoder whose rows may go on later: the turns of an episode, with what an environment says in between."""

    def hold(self, row: int) -> int:
        """Keeps what was computed for a row, which the next :meth:`keep` must drop; returns its number for
        :meth:`resume` or :meth:`release`. Not for a row whose newest token matters: only tokens that were fed count."""
        ...

    def resume(self, held: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Starts a row for each of these numbers after the running rows, and feeds it its tokens (at least one);
        returns the logits (len(held), V) after the last ones."""
        ...

    def release(self, held: int) -> None:
        """Frees what is kept under a number."""
        ...
