"""What every runner that computes log-probs and more in one pass shares: the questions of ``ModelRunner``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from .head import Beside
from .packing import Pack


class TokenValues(ABC):
    """Answers for log-probs alone, with entropies or with score norms, from one forward pass. Both cost time and
    memory: the pass leaves them out where nobody asks for them."""

    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        return self._values(pack)[0]

    def values_of(self, pack: Pack) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        logprobs, entropies = self._values(pack, beside="entropies")
        assert entropies is not None
        return logprobs, entropies

    def score_norms_of(self, pack: Pack) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        logprobs, norms = self._values(pack, beside="score_norms")
        assert norms is not None
        return logprobs, norms

    @abstractmethod
    def _values(self, pack: Pack, *, beside: Beside = None) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probs of the pack's tokens and, if asked for, what ``beside`` names; without gradient."""
