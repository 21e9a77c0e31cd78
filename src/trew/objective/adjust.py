"""Changes advantages after baseline and scale, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope, not_negative, positive
from .segments import standardize


@runtime_checkable
class Adjust(Component, Protocol):
    """Advantages (N,) from advantages (N,), in float64; values outside the mask are not read."""

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class WhitenTokens(Adjust):
    """A <- (A - mean A) / std A over all loss tokens of the step: REINFORCE++, arXiv 2501.03262.

    Long completions weigh more in mean and deviation, and a group's advantages no longer sum to 0. Exactly 0 where all
    are equal.
    """

    ddof: int = 1
    scope: ClassVar[Scope] = "batch"

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor:
        return standardize(advantages, where=batch.mask, ddof=self.ddof)

    def equation(self) -> str:
        return f"A_t <- (A_t - mean(A)) / std(A)      over all tokens of the batch, ddof = {self.ddof}"


@dataclass(frozen=True)
class EntropyAdvantage(Adjust):
    """A_t <- A_t + min(alpha H_t, |A_t| / kappa): arXiv 2506.14758. kappa > 1 keeps the sign of A."""

    alpha: float = 0.4
    kappa: float = 2.0

    def __post_init__(self) -> None:
        not_negative(alpha=self.alpha)
        positive(kappa=self.kappa)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropies",)

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.entropies is not None
        # Where an entropy bonus trains them they have a gradient, which must not flow through advantages.
        bonus = self.alpha * batch.entropies.detach().to(advantages.dtype)
        return advantages + torch.minimum(bonus, advantages.abs() / self.kappa)

    def equation(self) -> str:
        return f"A_t <- A_t + min({self.alpha:g} H_t, |A_t| / {self.kappa:g})"
