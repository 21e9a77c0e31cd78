"""A trust region in probabilities instead of ratios: DPPO.

A ratio is blind to how much probability has moved: from 1e-4 to 1e-2 is a factor of 100 and hardly a change of the
policy, from 0.99 to 0.80 is a factor of 0.81 and a large one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import TokenBatch
from .component import Component, positive, ratio_cap
from .weight import Weight


def binary_tv(logprobs: Float[Tensor, "N"], *, anchor_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """|pi - mu|: total variation between "this token" and "another one".

    >>> l = torch.tensor([1e-2, 0.8]).log(); m = torch.tensor([1e-4, 0.99]).log()
    >>> [round(d, 4) for d in binary_tv(l, anchor_logprobs=m).tolist()]
    [0.0099, 0.19]
    """
    return (logprobs.detach().exp() - anchor_logprobs.exp()).abs()


def binary_kl(logprobs: Float[Tensor, "N"], *, anchor_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) in nats: KL(mu || pi) of the same two events.

    >>> l = torch.tensor([1e-2, 0.8]).log(); m = torch.tensor([1e-4, 0.99]).log()
    >>> [round(d, 4) for d in binary_kl(l, anchor_logprobs=m).tolist()]
    [0.0095, 0.181]
    """
    mu = anchor_logprobs.exp()
    # log(1 - p) = log(-expm1(log p)): 1 - exp(log p) would lose all digits near p = 1. The bound keeps it finite there.
    other, anchor_other = (torch.log(-torch.expm1(x).clamp(max=-1e-12)) for x in (logprobs.detach(), anchor_logprobs))
    return mu * (anchor_logprobs - logprobs.detach()) + (1 - mu) * (anchor_other - other)


@runtime_checkable
class Distance(Component, Protocol):
    """How far a token's probability has moved."""

    def __call__(self, logprobs: Tensor, *, anchor_logprobs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class BinaryTV(Distance):
    """:func:`binary_tv` as a component."""

    def __call__(self, logprobs: Tensor, *, anchor_logprobs: Tensor) -> Tensor:
        return binary_tv(logprobs, anchor_logprobs=anchor_logprobs)

    def equation(self) -> str:
        return "|pi - mu|"


@dataclass(frozen=True)
class BinaryKL(Distance):
    """:func:`binary_kl` as a component."""

    def __call__(self, logprobs: Tensor, *, anchor_logprobs: Tensor) -> Tensor:
        return binary_kl(logprobs, anchor_logprobs=anchor_logprobs)

    def equation(self) -> str:
        return "mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))"


@dataclass(frozen=True)
class ProbabilityMask(Weight):
    """w = 0 if D > delta and r has moved in the direction of A (A > 0 and r > 1, or A < 0 and r < 1), else 1: DPPO,
    arXiv 2602.04879. Ratios above ``cap`` get w = cap / r. With D = |r - 1| it would be PPO's clip."""

    distance: Distance = field(default_factory=BinaryTV)
    delta: float = 0.15
    cap: float = float("inf")

    def __post_init__(self) -> None:
        positive(delta=self.delta)
        ratio_cap(cap=self.cap)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rollout_logprobs",)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        assert batch.rollout_logprobs is not None
        far = self.distance(batch.policy, anchor_logprobs=batch.rollout_logprobs) > self.delta
        # The sign of A log r: only moves further in the direction of the push are masked; moves back pass.
        onward = advantages * (batch.policy - batch.rollout_logprobs) > 0
        return torch.where(far & onward, 0.0, (self.cap / ratio).clamp(max=1.0))

    def equation(self) -> str:
        cap = "" if self.cap == float("inf") else f", at most {self.cap:g} / r"
        return (
            f"w = 0 if D > {self.delta:g} and (A > 0 and r > 1 or A < 0 and r < 1), else 1{cap}      "
            f"D = {self.distance.equation()}"
        )
