"""Trust-region weights (TRW-GRPO): slopes and smooth curves instead of a hard clip.

Every weight here is a function of the token's ratio and advantage. PPO's clip is a special case of the triangular one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import TokenBatch
from .component import not_negative, one_of, positive, ratio_cap, share_of
from .weight import Weight


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

    up(r), for A > 0:    1 below r = 1, falls linearly to w2 at 1 + eps_high, then w_out;
    down(r), for A < 0:  1 above r = 1, falls linearly to w0 at 1 - eps_low, then w_out.
    ``symmetric`` applies both sides whatever the sign of A, which also damps moves back towards r = 1.
    w0 = w2 = 1 with w_out = 0 equals PPO's clip to the last bit.

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
    # A = 0 is on neither side, and pushes nothing.
    return torch.where(advantages > 0, up, torch.where(advantages < 0, down, 1.0))


def logistic_weight(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    alpha: float = 2.0,
    gamma: float = 1.0,
    eta: float = 0.05,
    normalized: bool = False,
    directional: bool = False,
) -> Float[Tensor, "N"]:
    """w = sigma(-alpha u) sigma(gamma A) + eta, with u = |log r| (TRW-GRPO).

    w(1, A) = sigma(gamma A) / 2 + eta is not 1 and depends on the sign of A: even on-policy this is another objective,
    in which negative advantages count less. ``normalized``: (4 sigma(-alpha u) sigma(gamma A) + eta) /
    (1 + eta), which is 1 at r = 1, A = 0, and at r = 1 for every A where gamma = 0. ``directional``: u = max(0, sign(A)
    log r), so that moves back towards r = 1 are not damped.

    >>> w = logistic_weight(torch.tensor([1., 1.8]), advantages=torch.tensor([1., 1.]))
    >>> [round(x, 4) for x in w.tolist()]
    [0.4155, 0.2224]
    """
    log_r = ratio.log()
    u = (advantages.sign() * log_r).clamp(min=0) if directional else log_r.abs()
    # Each sigmoid is 1/2 at 0, so the product is 1/4 at r = 1, A = 0: hence the 4 where it is normalised.
    w = torch.sigmoid(-alpha * u) * torch.sigmoid(gamma * advantages)
    return (4 * w + eta) / (1 + eta) if normalized else w + eta


@dataclass(frozen=True)
class Triangular(Weight):
    """:func:`triangular_weight` as a component."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    w0: float = 0.5
    w2: float = 0.5
    w_out: float = 0.0
    symmetric: bool = False

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)
        share_of(w0=self.w0, w2=self.w2, w_out=self.w_out)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return triangular_weight(
            ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high,
            w0=self.w0, w2=self.w2, w_out=self.w_out, symmetric=self.symmetric,
        )  # fmt: skip

    def equation(self) -> str:
        sides = "whatever the sign of A" if self.symmetric else "up for A > 0, down for A < 0"
        return (
            f"w = 1 at r = 1, linearly to {self.w2:g} at r = {1 + self.eps_high:g} (up) and to {self.w0:g} at "
            f"r = {1 - self.eps_low:g} (down), {self.w_out:g} beyond; {sides}"
        )


@dataclass(frozen=True)
class Logistic(Weight):
    """:func:`logistic_weight` as a component; w is scaled by cap / r above ``cap``, which bounds w r."""

    alpha: float = 2.0
    gamma: float = 1.0
    eta: float = 0.05
    normalized: bool = False
    directional: bool = False
    cap: float = float("inf")

    def __post_init__(self) -> None:
        not_negative(alpha=self.alpha, eta=self.eta)
        ratio_cap(cap=self.cap)
        if not math.isfinite(self.gamma):
            raise ValueError(f"gamma: got {self.gamma!r}, accepts a finite number")

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        w = logistic_weight(
            ratio, advantages=advantages, alpha=self.alpha, gamma=self.gamma, eta=self.eta,
            normalized=self.normalized, directional=self.directional,
        )  # fmt: skip
        return w * (self.cap / ratio).clamp(max=1.0)

    def equation(self) -> str:
        u = "max(0, sign(A) log r)" if self.directional else "|log r|"
        w = f"sigma(-{self.alpha:g} u) sigma({self.gamma:g} A)"
        w = f"(4 {w} + {self.eta:g}) / {1 + self.eta:g}" if self.normalized else f"{w} + {self.eta:g}"
        return f"w = {w}{'' if self.cap == float('inf') else f', times min(1, {self.cap:g} / r)'}      u = {u}"


@dataclass(frozen=True)
class RareTokenBoost(Weight):
    """w_base (1 + lam [A > 0] rare min(A / a_max, 1)): a harder push for tokens that were unlikely.

    ``rarity`` "probability": rare = 1 - pi_old(y_t), under the policy that sampled, so that a token does not stop being
    rare while it is learned. "entropy": rare = min(H_t / h_max, 1), with H in nats.
    """

    base: Weight
    lam: float = 0.5
    a_max: float = 1.0
    rarity: str = "probability"
    h_max: float = 1.0

    def __post_init__(self) -> None:
        not_negative(lam=self.lam)
        positive(a_max=self.a_max, h_max=self.h_max)
        one_of(("probability", "entropy"), rarity=self.rarity)
        if self.rarity != "entropy" and self.h_max != 1.0:
            raise ValueError(f"h_max: got {self.h_max!r}, but rarity = {self.rarity!r} reads no entropy; leave it out")
        # A frozen dataclass allows no assignment; the scope is the base's, since the boost reads the token alone.
        object.__setattr__(self, "scope", self.base.scope)

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.base.needs, *(("entropies",) if self.rarity == "entropy" else ()))

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        if self.rarity == "entropy":
            assert batch.entropies is not None
            rare = (batch.entropies.detach() / self.h_max).clamp(max=1.0)
        else:
            rare = 1 - batch.old.exp()
        # The lower bound of the clamp is [A > 0]: tokens with A < 0 keep the base's weight.
        boost = self.lam * rare * (advantages / self.a_max).clamp(0.0, 1.0)
        return self.base(ratio, advantages=advantages, batch=batch) * (1 + boost)

    def equation(self) -> str:
        rare = "1 - pi_old(y_t)" if self.rarity == "probability" else f"min(H_t / {self.h_max:g}, 1)"
        lines = f"w_base (1 + {self.lam:g} rare min(A / {self.a_max:g}, 1) if A > 0)      rare = {rare}"
        return f"w = {lines}; {self.base.equation().replace('w = ', 'w_base = ', 1)}"
