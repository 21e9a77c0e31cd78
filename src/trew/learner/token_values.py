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

    def values_of(self, pack: Pack, beside: Beside) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        logprobs, more = self._values(pack, beside=beside)
        assert more is not None
        return logprobs, more

    @abstractmethod
    def _values(self, pack: Pack, *, beside: Beside | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the log-probs of the pack's tokens and, if asked for, what ``beside`` names; without gradient."""
