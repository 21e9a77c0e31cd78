"""How far the policy has moved: the importance ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .advantage import Coupling
from .batch import TokenBatch

LOG_RATIO_LIMIT = 20.0
"""exp is taken of log-ratios within ± this: beyond it a ratio is 5e8, and no trust region distinguishes further."""


def token_ratio(logprobs: Float[Tensor, "N"], *, anchor_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """r_t = pi_theta(y_t) / pi_anchor(y_t), without gradient: PPO, arXiv 1707.06347, eq. 6.

    >>> token_ratio(torch.tensor([0.9]).log(), anchor_logprobs=torch.tensor([0.5]).log())
    tensor([1.8000])
    """
    return (logprobs.detach() - anchor_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@runtime_checkable
class Ratio(Protocol):
    """One ratio per token, without gradient."""

    couples: ClassVar[Coupling]

    def __call__(self, batch: TokenBatch) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """:func:`token_ratio` against the old policy; exactly 1 where ``old_logprobs`` is not given."""

    couples: ClassVar[Coupling] = "token"

    def __call__(self, batch: TokenBatch) -> Tensor:
        if batch.old_logprobs is None:
            return torch.ones_like(batch.logprobs.detach())
        return token_ratio(batch.logprobs, anchor_logprobs=batch.old_logprobs)

    def equation(self) -> str:
        return "r_t = pi(y_t) / pi_old(y_t)"
