"""Which prompts a step takes: a pure function of the position, so resuming needs one number."""

from __future__ import annotations

import numpy as np

from ..errors import DataError


class PromptSampler:
    """Passes over ``size`` prompts again and again, every epoch in an order of its own.

    >>> sampler = PromptSampler(3, seed=0, shuffle=False)
    >>> sampler.take(2, 3)
    [2, 0, 1]
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True):
        if size < 1:
            raise DataError("there are no prompts to sample from")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None  # the last epoch's order: saves work, holds no state

    def take(self, position: int, k: int) -> list[int]:
        """Indices number ``position`` to ``position + k - 1`` of the endless sequence; may cross epochs."""
        if position < 0 or k < 0:
            raise ValueError(f"position and k must not be negative, got {position} and {k}")
        return [int(self._order(i // self.size)[i % self.size]) for i in range(position, position + k)]

    def epoch(self, position: int) -> float:
        """How many passes over the prompts are complete at ``position``."""
        return position / self.size

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._permutation(epoch))
        return self._cached[1]

    def _permutation(self, epoch: int) -> np.ndarray:
        """The order of one epoch: a permutation drawn under the key (seed, epoch)."""
        if not self._shuffle:
            return np.arange(self.size)
        key = np.array([self._seed, epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(self.size)
