"""Imitation as a rule for advantages: every demonstration counts 1, or every correct completion does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope
from .preferred import Preferred


@dataclass(frozen=True)
class Demonstrated(Advantage):
    """A_i = 1 for every completion, so that the gradient is that of the log-likelihood: arXiv 2402.03300 App. A.1.

    The completions must be demonstrations. On the policy's own, the gradient is 0 on average.
    """

    scope: ClassVar[Scope] = "sequence"
    reads_rewards: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        # Demonstrations may have no rewards, which are zeros here; NaN: a sequence that takes no part.
        return torch.where(rewards.isnan(), 0.0, torch.ones_like(rewards))

    def equation(self) -> str:
        return "A_i = 1"


@dataclass(frozen=True)
class CorrectOnly(Advantage):
    """A_i = 1 if completion i is correct, else 0: arXiv 2402.03300 App. A.1."""

    scope: ClassVar[Scope] = "sequence"
    reads_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return torch.where(rewards.isnan(), 0.0, batch.is_correct.to(rewards.dtype))

    def equation(self) -> str:
        return "A_i = 1 if correct, else 0"


@dataclass(frozen=True)
class CorrectDemonstrations(CorrectOnly):
    """:class:`CorrectOnly` for completions that another policy than the current one sampled, the initial one."""

    def equation(self) -> str:
        return "A_i = 1 if correct, else 0      completions of the initial policy"


DEMONSTRATED = (Demonstrated, CorrectDemonstrations, Preferred)
"""The advantages of completions that the current policy has not sampled."""
