"""The trust region: which part of a token's push is let through, as a weight w(r, A).

The coefficient of a token is ``w(r, A) r A``. w = 1 is plain importance-weighted policy gradient, w = 0 a clipped
token. w is never differentiated: with a gradient through it the coefficient would be r A (w + r dw/dr), which has the
wrong sign right where training starts, at r = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .advantage import Coupling


def clip_weight(
    ratio: Float[Tensor, "N"], *, advantages: Float[Tensor, "N"], eps_low: float = 0.2, eps_high: float = 0.2
) -> Float[Tensor, "N"]:
    """w = 0 if (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 - eps_low), else 1.

    The gradient of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): PPO arXiv 1707.06347 eq. 7; with
    eps_high > eps_low it is the clip-higher of DAPO, arXiv 2503.14476 eq. 8. Only two of the four (side, sign of A)
    cases are clipped: the other two move r back towards 1.

    >>> clip_weight(torch.tensor([1.8, 0.4]), advantages=torch.tensor([1., 1.])).tolist()
    [0.0, 1.0]
    """
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    return (~(too_high | too_low)).to(ratio.dtype)


def triangular_weight(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    w0: float = 0.5,
    w2: float = 0.5,
    w_out: float = 0.0,
    symmetric: bool = False,
) -> Float[Tensor, "N"]:
    """A tent over the trust region (TRW-GRPO).

    up(r), for A > 0:    1 below 1, falls linearly to w2 at 1 + eps_high, then w_out;
    down(r), for A < 0:  1 above 1, falls linearly to w0 at 1 - eps_low, then w_out.
    ``symmetric`` applies both sides whatever the sign of A, which also damps moves back towards r = 1.
    w0 = w2 = 1 with w_out = 0 is :func:`clip_weight` to the last bit.

    >>> r = torch.tensor([1.14, 1.3, 0.7]); a = torch.ones(3)
    >>> [round(w, 4) for w in triangular_weight(r, advantages=a).tolist()]
    [0.75, 0.0, 1.0]
    """
    up = 1 - (1 - w2) * (ratio - 1).clamp(min=0) / eps_high
    up = torch.where(ratio > 1 + eps_high, w_out, up)
    down = 1 - (1 - w0) * (1 - ratio).clamp(min=0) / eps_low
    down = torch.where(ratio < 1 - eps_low, w_out, down)
    if symmetric:
        return torch.where(ratio > 1, up, down)
    return torch.where(advantages > 0, up, torch.where(advantages < 0, down, 1.0))


@runtime_checkable
class Weight(Protocol):
    """w(r, A) per token, and the value of the surrogate that it belongs to (for monitoring; it has no gradient)."""

    couples: ClassVar[Coupling]

    def __call__(self, ratio: Tensor, *, advantages: Tensor) -> Tensor: ...

    def surrogate(self, ratio: Tensor, *, advantages: Tensor) -> Tensor: ...

    def equation(self) -> str: ...


def _check_range(eps_low: float, eps_high: float) -> None:
    if not eps_low > 0:
        raise ValueError(f"eps_low: got {eps_low!r}, accepts a number above 0")
    if not eps_high > 0:
        raise ValueError(f"eps_high: got {eps_high!r}, accepts a number above 0")


@dataclass(frozen=True, slots=True)
class Clip:
    """:func:`clip_weight` as a value."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    couples: ClassVar[Coupling] = "token"

    def __post_init__(self) -> None:
        _check_range(self.eps_low, self.eps_high)

    def __call__(self, ratio: Tensor, *, advantages: Tensor) -> Tensor:
        return clip_weight(ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high)

    def surrogate(self, ratio: Tensor, *, advantages: Tensor) -> Tensor:
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        return torch.minimum(ratio * advantages, clipped * advantages)

    def equation(self) -> str:
        return f"w = 0 if (A > 0 and r > {1 + self.eps_high:g}) or (A < 0 and r < {1 - self.eps_low:g}), else 1"


@dataclass(frozen=True, slots=True)
class Triangular:
    """:func:`triangular_weight` as a value."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    w0: float = 0.5
    w2: float = 0.5
    w_out: float = 0.0
    symmetric: bool = False
    couples: ClassVar[Coupling] = "token"

    def __post_init__(self) -> None:
        _check_range(self.eps_low, self.eps_high)
        for name in ("w0", "w2", "w_out"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, accepts a number from 0 to 1")

    def __call__(self, ratio: Tensor, *, advantages: Tensor) -> Tensor:
        return triangular_weight(
            ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high,
            w0=self.w0, w2=self.w2, w_out=self.w_out, symmetric=self.symmetric,
        )  # fmt: skip

    def surrogate(self, ratio: Tensor, *, advantages: Tensor) -> Tensor:
        return self(ratio, advantages=advantages) * ratio * advantages

    def equation(self) -> str:
        sides = "whatever the sign of A" if self.symmetric else "up for A > 0, down for A < 0"
        return (
            f"w = 1 at r = 1, linearly to {self.w2:g} at r = {1 + self.eps_high:g} (up) and to {self.w0:g} at "
            f"r = {1 - self.eps_low:g} (down), {self.w_out:g} beyond; {sides}"
        )
