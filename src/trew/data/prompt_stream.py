"""Chooses the prompts of each step as a pure function of the position, so that resuming needs one number."""

from __future__ import annotations

import numpy as np

from ..errors import DataError


class PromptStream:
    """An endless stream of prompt indices: passes over ``size`` prompts, each epoch in its own order.

    >>> stream = PromptStream(3, seed=0, shuffle=False)
    >>> stream.take(2, 3)
    [2, 0, 1]
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True):
        if size < 1:
            raise DataError("there are no prompts to train on")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None  # the last epoch's order: a cache, not state

    def take(self, position: int, k: int) -> list[int]:
        """Entries ``position`` to ``position + k - 1`` of the stream; may cross epochs."""
        if position < 0 or k < 0:
            raise ValueError(f"position, k: got {position} and {k}, accepts whole numbers of at least 0")
        return [int(self._order(i // self.size)[i % self.size]) for i in range(position, position + k)]

    def epoch(self, position: int) -> float:
        """The number of passes over the prompts that are complete at ``position``."""
        return position / self.size

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._permutation(epoch))
        return self._cached[1]

    def _permutation(self, epoch: int) -> np.ndarray:
        """The order of one epoch: a permutation drawn with the key (seed, epoch)."""
        if not self._shuffle:
            return np.arange(self.size)
        # A generator for each epoch: its order needs none of those before it, and a resumed run finds the same one.
        key = np.array([self._seed, epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(self.size)
