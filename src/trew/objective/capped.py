"""Weights that bound the importance ratio and keep the gradient of clipped tokens: CISPO, AIPO, TOPR, ASPO, CE-GPPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .batch import TokenBatch
from .component import not_negative, positive, ratio_cap
from .weight import DualClip, LinearWeight, Weight


def capped_weight(ratio: Float[Tensor, "N"], *, cap: float = 5.0, floor: float = 0.0) -> Float[Tensor, "N"]:
    """w = clip(r, floor, cap) / r, so that w r = clip(r, floor, cap): CISPO, MiniMax-M1 arXiv 2506.13585 eq. 4.

    >>> r = torch.tensor([0.4, 1.0, 6.0])
    >>> [round(x, 4) for x in (capped_weight(r) * r).tolist()]
    [0.4, 1.0, 5.0]
    """
    return ratio.clamp(floor, cap) / ratio


def tapered_weight(ratio: Float[Tensor, "N"], *, correct: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
    """w r = 1 for correct answers, clip(r, 0, 1) for wrong ones: TOPR, arXiv 2503.14286 eq. 8.

    >>> r = torch.tensor([0.5, 2.0, 0.5, 2.0]); right = torch.tensor([True, True, False, False])
    >>> (tapered_weight(r, correct=right) * r).tolist()
    [1.0, 1.0, 0.5, 1.0]
    """
    return torch.where(correct, 1.0, ratio.clamp(max=1.0)) / ratio


def flipped_weight(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "N"]:
    """w r = min(1/r, cap) for A > 0 and min(r, cap) for A < 0, both 0 where PPO clips: ASPO, arXiv 2510.06062.

    For A > 0 the ratio is inverted: tokens whose probability has fallen are pushed harder, not less.

    >>> r = torch.tensor([0.2, 0.5, 1.3])
    >>> [round(x, 4) for x in (flipped_weight(r, advantages=torch.ones(3)) * r).tolist()]
    [3.0, 2.0, 0.0]
    """
    # These are w r, the effective ratio; the division by r at the end turns them into w. r is bounded away from 0 by
    # the clamp of log-ratios (LOG_RATIO_LIMIT), so neither 1 / r nor the division overflows.
    up = torch.where(ratio > 1 + eps_high, 0.0, (1 / ratio).clamp(max=cap))
    down = torch.where(ratio < 1 - eps_low, 0.0, ratio.clamp(max=cap))
    return torch.where(advantages > 0, up, torch.where(advantages < 0, down, ratio)) / ratio


def preserving_weight(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta1: float = 0.75,
    beta2: float = 1.0,
    cap: float = 3.0,
) -> Float[Tensor, "N"]:
    """w r = beta2 (1 + eps_high) where PPO clips for A > 0, beta1 (1 - eps_low) where it clips for A < 0, 0 where dual
    clip does (A < 0 and r > cap), and r elsewhere: CE-GPPO, arXiv 2509.20712.

    A clipped token is pushed by an amount that does not depend on how far its ratio has moved. With beta1 = beta2 = 0
    it is dual clip.

    >>> r = torch.tensor([2.0, 0.4, 4.0]); a = torch.tensor([1., -1., -1.])
    >>> [round(x, 4) for x in (preserving_weight(r, advantages=a) * r).tolist()]
    [1.2, 0.6, 0.0]
    """
    w = torch.where((advantages > 0) & (ratio > 1 + eps_high), beta2 * (1 + eps_high) / ratio, 1.0)
    w = torch.where((advantages < 0) & (ratio < 1 - eps_low), beta1 * (1 - eps_low) / ratio, w)
    return torch.where((advantages < 0) & (ratio > cap), 0.0, w)


@dataclass(frozen=True)
class Capped(LinearWeight):
    """:func:`capped_weight` as a component."""

    cap: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        ratio_cap(cap=self.cap)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor: got {self.floor!r}, accepts 0 to 1, since it bounds the ratio itself")

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return capped_weight(ratio, cap=self.cap, floor=self.floor)

    def equation(self) -> str:
        if not self.floor:
            return f"w = min(1, {self.cap:g} / r)"
        return f"w = clip(r, {self.floor:g}, {self.cap:g}) / r"


@dataclass(frozen=True)
class Tapered(LinearWeight):
    """:func:`tapered_weight` as a component; where correctness is unknown, by the sign of the advantage."""

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        if batch.correct is None and batch.rewards is None:
            return tapered_weight(ratio, correct=advantages > 0)
        return tapered_weight(ratio, correct=batch.is_correct[batch.sequence_ids])

    def equation(self) -> str:
        return "w = 1 / r for correct answers, min(1, 1 / r) for wrong ones"


@dataclass(frozen=True)
class Flipped(Weight):
    """:func:`flipped_weight` as a component."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    cap: float = 3.0

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)
        ratio_cap(cap=self.cap)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return flipped_weight(ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high, cap=self.cap)

    def equation(self) -> str:
        return (
            f"w = min(1/r, {self.cap:g}) / r if A > 0, min(1, {self.cap:g} / r) if A < 0; 0 if "
            f"(A > 0 and r > {1 + self.eps_high:g}) or (A < 0 and r < {1 - self.eps_low:g})"
        )


@dataclass(frozen=True)
class GradientPreservingClip(Weight):
    """:func:`preserving_weight` as a component."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    beta1: float = 0.75
    beta2: float = 1.0
    cap: float = 3.0

    def __post_init__(self) -> None:
        # Made only to check the numbers.
        DualClip(self.eps_low, self.eps_high, self.cap)
        not_negative(beta1=self.beta1, beta2=self.beta2)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return preserving_weight(
            ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high,
            beta1=self.beta1, beta2=self.beta2, cap=self.cap,
        )  # fmt: skip

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        # A dual-clipped token has w = 0, but its surrogate stays at the cap, as in DualClip.
        pushed = super().surrogate(ratio, advantages=advantages, batch=batch)
        return torch.where((advantages < 0) & (ratio > self.cap), self.cap * advantages, pushed)

    def equation(self) -> str:
        return (
            f"w = {self.beta2:g} * {1 + self.eps_high:g} / r if A > 0 and r > {1 + self.eps_high:g}, {self.beta1:g} * "
            f"{1 - self.eps_low:g} / r if A < 0 and r < {1 - self.eps_low:g}, 0 if A < 0 and r > {self.cap:g}, else 1"
        )
