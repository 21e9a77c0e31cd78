"""A trust region that is a band around the sampler: a token outside carries no push, whatever the sign of A.

PPO's clip and DPPO let a move back towards the sampler pass. A band does not: outside it the sampler's tokens say
little about the policy, and are taken for noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from .batch import TokenBatch
from .component import Component, positive
from .probability import binary_tv
from .weight import LinearWeight, Weight


def ratio_band(ratio: Float[Tensor, "N"], *, eps_low: float = 0.2, eps_high: float = 0.2) -> Bool[Tensor, "N"]:
    """1 - eps_low < r < 1 + eps_high: GLM-5, arXiv 2602.15763 eq. 3. The bounds themselves are outside.

    >>> ratio_band(Tensor([0.7, 1.0, 1.3])).tolist()
    [False, True, False]
    """
    return (ratio > 1 - eps_low) & (ratio < 1 + eps_high)


@runtime_checkable
class Band(Component, Protocol):
    """True (N,) for the tokens inside the band."""

    def __call__(self, ratio: Tensor, *, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class RatioBand(Band):
    """:func:`ratio_band` as a component, of whichever ratio the objective has."""

    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)

    def __call__(self, ratio: Tensor, *, batch: TokenBatch) -> Tensor:
        return ratio_band(ratio, eps_low=self.eps_low, eps_high=self.eps_high)

    def equation(self) -> str:
        return f"{1 - self.eps_low:g} < r < {1 + self.eps_high:g}"


@dataclass(frozen=True)
class ProbabilityBand(Band):
    """|pi - mu| <= delta: the "ipo" loss of prime-rl."""

    delta: float = 0.1

    def __post_init__(self) -> None:
        positive(delta=self.delta)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rollout_logprobs",)

    def __call__(self, ratio: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.rollout_logprobs is not None
        return binary_tv(batch.policy, anchor_logprobs=batch.rollout_logprobs) <= self.delta

    def equation(self) -> str:
        return f"|pi - mu| <= {self.delta:g}"


@dataclass(frozen=True)
class BandMask(Weight):
    """w = 1 inside the band, else 0, with the surrogate w r A."""

    band: Band = field(default_factory=RatioBand)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.band.needs

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return self.band(ratio, batch=batch).to(ratio.dtype)

    def equation(self) -> str:
        return f"w = 1 if {self.band.equation()}, else 0"


@dataclass(frozen=True)
class LinearBandMask(BandMask, LinearWeight):
    """:class:`BandMask` with the surrogate sg(w r) A log pi."""
