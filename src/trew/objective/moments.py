"""M2PO: a bound on the second moment of the step's log-ratios, kept by dropping the tokens that exceed it most.

It needs the whole optimizer step: which tokens are dropped depends on all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .batch import TokenBatch
from .component import Scope, one_of, positive
from .weight import Weight

BOUNDED = ("growing", "all")


def within_second_moment(
    log_ratio: Float[Tensor, "N"], *, bounded: Bool[Tensor, "N"], tau: float = 0.04
) -> Bool[Tensor, "N"]:
    """False for the ``bounded`` tokens with the largest (log r)^2, as few as leave mean (log r)^2 of the rest at most
    tau: M2PO, arXiv 2510.01161 Algorithm 1. True for all other tokens.

    Tokens with the same (log r)^2 are dropped together, so that the order of tokens does not matter. Without bounded
    tokens nothing is dropped; where even the smallest (log r)^2 exceeds tau, all bounded tokens are.

    >>> l, every = torch.tensor([0.1, 0.2, -0.3, 0.5]), torch.ones(4, dtype=torch.bool)
    >>> within_second_moment(l, bounded=every).tolist(), within_second_moment(l, bounded=every, tau=0.05).tolist()
    ([True, True, False, False], [True, True, True, False])
    """
    squares = log_ratio.to(torch.float64) ** 2
    ascending = squares[bounded].sort().values
    # The mean of the smallest k grows with k, so that the paper's loop, which drops one at a time, is one comparison.
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    kept = int((means <= tau).sum())
    if kept == len(ascending):
        return torch.ones_like(bounded)
    # By value and not by rank: tokens with equal squares go together.
    return ~(bounded & (squares >= ascending[kept]))


@dataclass(frozen=True)
class SecondMomentMask(Weight):
    """w = 0 for the tokens that :func:`within_second_moment` drops, else 1. ``tokens`` says which are bounded:
    "growing" ones, whose ratio has moved in the direction of A (A > 0 and r > 1, or A < 0 and r < 1), or "all"."""

    tau: float = 0.04
    tokens: str = "growing"
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        positive(tau=self.tau)
        one_of(BOUNDED, tokens=self.tokens)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        growing = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
        bounded = batch.mask & growing if self.tokens == "growing" else batch.mask
        return within_second_moment(ratio.log(), bounded=bounded, tau=self.tau).to(ratio.dtype)

    def equation(self) -> str:
        bounded = "tokens with A > 0 and r > 1 or A < 0 and r < 1" if self.tokens == "growing" else "all tokens"
        return (
            f"w = 0 for the largest (log r)^2 among {bounded}, until the mean of the rest is at most {self.tau:g}, "
            "else 1"
        )
