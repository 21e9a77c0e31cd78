"""Weights that fall off smoothly instead of clipping: SAPO and VESPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import TokenBatch
from .component import not_negative, positive
from .weight import LinearWeight, Weight


def _by_sign(positive_side: Tensor, one: float, other: float, *, like: Tensor) -> Tensor:
    """One of two numbers, in the precision of ``like`` (torch.where of two Python numbers is float32)."""
    return torch.where(positive_side, torch.full_like(like, one), other)


def sech2_weight(
    ratio: Float[Tensor, "N"], *, advantages: Float[Tensor, "N"], tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Float[Tensor, "N"]:
    """w = sech^2(tau (r - 1) / 2), tau = tau_pos if A > 0 else tau_neg: SAPO, arXiv 2511.20347.

    It is f'(r) of the surrogate f(r) A, f = (4 / tau) sigma(tau (r - 1)). It is symmetric around r = 1, so it damps
    moves back towards 1 as well.

    >>> r = torch.tensor([1.0, 1.8]); round(sech2_weight(r, advantages=torch.ones(2))[1].item(), 6)
    0.855639
    """
    tau = _by_sign(advantages > 0, tau_pos, tau_neg, like=ratio)
    p = torch.sigmoid(tau * (ratio - 1))
    return 4 * p * (1 - p)  # = sech^2(tau (r - 1) / 2)


def gamma_kernel(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> Float[Tensor, "N"]:
    """phi(W) = W^k exp(lam (1 - W)), (k, lam) by the sign of A (0 counts as positive): VESPO, arXiv 2602.10693.

    phi(1) = 1, the maximum is at W = k / lam, and phi is 0 at both ends. It replaces the ratio: w = phi(W) / W.

    >>> round(gamma_kernel(torch.tensor([0.5]), advantages=torch.ones(1)).item(), 6)
    1.120422
    """
    k = _by_sign(advantages >= 0, k_pos, k_neg, like=ratio)
    lam = _by_sign(advantages >= 0, lam_pos, lam_neg, like=ratio)
    # In log space: as a product, W^k may overflow where the exponential underflows, and inf * 0 is NaN.
    return (k * ratio.log() + lam * (1 - ratio)).exp()


@dataclass(frozen=True)
class Sech2(Weight):
    """:func:`sech2_weight` as a component."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        positive(tau_pos=self.tau_pos, tau_neg=self.tau_neg)
        not_negative(tau_pos=self.tau_pos, tau_neg=self.tau_neg)  # finite: at r = 1 it is multiplied by 0

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return sech2_weight(ratio, advantages=advantages, tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        tau = _by_sign(advantages > 0, self.tau_pos, self.tau_neg, like=ratio)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages

    def equation(self) -> str:
        return f"w = sech^2(tau (r - 1) / 2)      tau = {self.tau_pos:g} if A > 0, {self.tau_neg:g} else"


@dataclass(frozen=True)
class GammaKernel(LinearWeight):
    """:func:`gamma_kernel` over the ratio, as a component. A mismatch correction is multiplied into the ratio,
    as its product over the sequence."""

    folds_correction: ClassVar[bool] = True
    k_pos: float = 2.0
    lam_pos: float = 3.0
    k_neg: float = 3.0
    lam_neg: float = 2.0

    def __post_init__(self) -> None:
        # k below 1 would let phi(W) / W grow without bound towards W = 0.
        for name in ("k_pos", "k_neg"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, accepts 1 or more, finite")
        not_negative(lam_pos=self.lam_pos, lam_neg=self.lam_neg)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        # phi(W) / W is the kernel with k - 1. As a quotient it would be 0 / 0 where both underflow.
        return gamma_kernel(
            ratio, advantages=advantages, k_pos=self.k_pos - 1, lam_pos=self.lam_pos,
            k_neg=self.k_neg - 1, lam_neg=self.lam_neg,
        )  # fmt: skip

    def equation(self) -> str:
        return (
            f"w = phi(r) / r, phi = r^{self.k_pos:g} e^({self.lam_pos:g} (1 - r)) if A >= 0, "
            f"r^{self.k_neg:g} e^({self.lam_neg:g} (1 - r)) if A < 0"
        )
