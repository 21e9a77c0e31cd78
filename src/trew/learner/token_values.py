"""What every runner that computes log-probs and entropies in one pass shares: the two questions of ``ModelRunner``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from .packing import Pack


class TokenValues(ABC):
    """Answers for log-probs alone, or with entropies, from one forward pass. The entropies cost time and memory: the
    pass leaves them out where nobody asks for them."""

    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        return self._values(pack, entropies=False)[0]

    def values_of(self, pack: Pack) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        logprobs, entropies = self._values(pack, entropies=True)
        assert entropies is not None
        return logprobs, entropies

    @abstractmethod
    def _values(self, pack: Pack, *, entropies: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probs of the pack's tokens and, if asked for, their entropies; without gradient."""
