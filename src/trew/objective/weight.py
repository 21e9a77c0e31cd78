"""The trust region as a weight w(r, A): how much of a token's push is let through. The clip family.

The coefficient of a token is ``w(r, A) r A``. w = 1 is the plain importance-weighted policy gradient, w = 0 a clipped
token. w is never differentiated: with a gradient through it the coefficient would be r A (w + r dw/dr), which for a
tent has the wrong sign where training starts, at r = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope, positive
from .ratio import log_ratio
from .segments import segment_mean


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


def dual_clip_weight(
    ratio: Float[Tensor, "N"],
    *,
    advantages: Float[Tensor, "N"],
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    cap: float = 3.0,
) -> Float[Tensor, "N"]:
    """:func:`clip_weight`, and w = 0 if A < 0 and r > cap, where the clipped surrogate is unbounded below.

    Dual-clip PPO, arXiv 1912.09729 eq. 5. The two-sided clip of INTELLECT-2, arXiv 2505.07291, is the same with
    delta for cap.

    >>> dual_clip_weight(torch.tensor([2., 3.5]), advantages=torch.tensor([-1., -1.])).tolist()
    [1.0, 0.0]
    """
    w = clip_weight(ratio, advantages=advantages, eps_low=eps_low, eps_high=eps_high)
    return torch.where((advantages < 0) & (ratio > cap), 0.0, w)


@runtime_checkable
class Weight(Component, Protocol):
    """w(r, A) per token, (N,), without gradient. ``surrogate`` is the value per token that the loss reports.

    ``linear``: the surrogate is linear in log pi, so it counts for each token even if the sequence has one ratio.
    ``folds_correction``: a mismatch correction is multiplied into the ratio, over the sequence, and not into C_t.
    """

    linear: ClassVar[bool] = False
    folds_correction: ClassVar[bool] = False

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor: ...

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return self(ratio, advantages=advantages, batch=batch) * ratio * advantages

    def margins(self, *, advantages: Tensor, batch: TokenBatch) -> Tensor | None:
        """(N,): by how much the policy prefers each token's completion in the right direction, for metrics; None for
        weights that compare no completions."""
        return None


@runtime_checkable
class LinearWeight(Weight, Protocol):
    """A weight whose surrogate is sg(w r) A log pi, linear in the log-probability, as the papers write it."""

    linear: ClassVar[bool] = True

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        # The value alone, so without gradient: the coefficients carry that.
        return self(ratio, advantages=advantages, batch=batch) * ratio * advantages * batch.policy


@dataclass(frozen=True)
class PolicyGradient(LinearWeight):
    """w = 1 with the surrogate A log pi: REINFORCE, Williams 1992."""

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return torch.ones_like(ratio)

    def equation(self) -> str:
        return "w = 1"


@dataclass(frozen=True)
class Unclipped(Weight):
    """w = 1 with the surrogate r A: importance-weighted policy gradient without a trust region."""

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return torch.ones_like(ratio)

    def equation(self) -> str:
        return "w = 1"


@dataclass(frozen=True)
class Clip(Weight):
    """:func:`clip_weight` as a component."""

    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return clip_weight(ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high)

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        # The minimum, not w r A: PPO reports a clipped token's value at the edge of the range, and not as 0.
        return torch.minimum(ratio * advantages, clipped * advantages)

    def equation(self) -> str:
        return f"w = 0 if (A > 0 and r > {1 + self.eps_high:g}) or (A < 0 and r < {1 - self.eps_low:g}), else 1"


@dataclass(frozen=True)
class DualClip(Weight):
    """:func:`dual_clip_weight` as a component."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    cap: float = 3.0

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)
        if not self.cap > 1 + self.eps_high:
            raise ValueError(f"cap: got {self.cap!r}, accepts a number above 1 + eps_high = {1 + self.eps_high:g}")

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return dual_clip_weight(
            ratio, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high, cap=self.cap
        )

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        # For A < 0 PPO's minimum is unbounded below as r grows; the maximum with cap A bounds it.
        once = Clip(self.eps_low, self.eps_high).surrogate(ratio, advantages=advantages, batch=batch)
        return torch.where(advantages < 0, torch.maximum(once, self.cap * advantages), once)

    def equation(self) -> str:
        return (
            f"w = 0 if (A > 0 and r > {1 + self.eps_high:g}) or (A < 0 and (r < {1 - self.eps_low:g} or "
            f"r > {self.cap:g})), else 1"
        )


@dataclass(frozen=True)
class MeanRatioClip(Weight):
    """:func:`clip_weight` of the arithmetic mean of the sequence's token ratios: GRPO-S, arXiv 2508.04349 eq. 11.

    The surrogate is min(m A, clip(m) A) with m = mean_t r_t. Its gradient lets every token through with its own r_t, or
    none of the sequence.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    scope: ClassVar[Scope] = "sequence"

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)

    def _mean(self, ratio: Tensor, batch: TokenBatch) -> Tensor:
        return segment_mean(ratio, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)[batch.sequence_ids]

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        mean = self._mean(ratio, batch)
        return clip_weight(mean, advantages=advantages, eps_low=self.eps_low, eps_high=self.eps_high)

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        clip = Clip(self.eps_low, self.eps_high)
        return clip.surrogate(self._mean(ratio, batch), advantages=advantages, batch=batch)

    def equation(self) -> str:
        return (
            f"w = 0 if (A > 0 and m > {1 + self.eps_high:g}) or (A < 0 and m < {1 - self.eps_low:g}), else 1      "
            "m = mean_t r_t"
        )


@dataclass(frozen=True)
class LogClip(Weight):
    """w = 0 if (A > 0 and log r > eps_high) or (A < 0 and log r < -eps_low), else 1, r the token's own ratio: GMPO,
    arXiv 2507.20673, whose surrogate is the clipped geometric ratio times A."""

    eps_low: float = 0.4
    eps_high: float = 0.4

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        # From the log-probs, not from ``ratio``, which in GMPO is the sequence's geometric mean: the cut is per token.
        log_r = log_ratio(batch)
        cut = ((advantages > 0) & (log_r > self.eps_high)) | ((advantages < 0) & (log_r < -self.eps_low))
        return (~cut).to(ratio.dtype)

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        return ratio * advantages

    def equation(self) -> str:
        return f"w = 0 if (A > 0 and log r > {self.eps_high:g}) or (A < 0 and log r < -{self.eps_low:g}), else 1"
