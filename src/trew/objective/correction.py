"""Corrects for train-rollout mismatch: a factor c for tokens whose sampler and trainer disagree.

With kappa_t = pi_old(y_t) / mu(y_t), mu the sampler's own probabilities at the same weights, or at older ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope, one_of, positive
from .ratio import bounded_exp, geometric_ratio, product_ratio, token_ratio
from .segments import segment_mean, segment_sum


def truncated_importance(
    old_logprobs: Float[Tensor, "N"], *, rollout_logprobs: Float[Tensor, "N"], low: float = 0.0, high: float = 2.0
) -> Float[Tensor, "N"]:
    """c_t = clip(kappa_t, low, high): token-level TIS (Yao et al. 2025).

    >>> truncated_importance(torch.tensor([0., -1.]), rollout_logprobs=torch.tensor([-1., -1.])).tolist()
    [2.0, 1.0]
    """
    return token_ratio(old_logprobs, anchor_logprobs=rollout_logprobs).clamp(low, high)


def off_policy_sequences(
    logprobs: Float[Tensor, "N"],
    *,
    behaviour_logprobs: Float[Tensor, "N"],
    advantages: Float[Tensor, "N"],
    mask: Bool[Tensor, "N"],
    sequence_ids: Int[Tensor, "N"],
    size: int,
    delta: float = 0.5,
) -> Bool[Tensor, "N"]:
    """False where A < 0 and mean_t log(behaviour / pi) > delta in nats: the off-policy sequence mask of DeepSeek-V3.2,
    arXiv 2512.02556. Wrong answers that the policy has already moved away from teach it nothing.

    >>> l, b = torch.tensor([-3., -3., -3.]), torch.tensor([-1., -1., -1.])
    >>> off_policy_sequences(l, behaviour_logprobs=b, advantages=torch.tensor([-1., -1., 1.]), size=2,
    ...     mask=torch.tensor([True, True, True]), sequence_ids=torch.tensor([0, 0, 1])).tolist()
    [False, False, True]
    """
    # A sequence is judged as a whole, by the mean over its tokens; A is looked at token by token, and is the same for
    # all tokens of a sequence unless the objective makes it differ.
    drift = segment_mean(behaviour_logprobs - logprobs.detach(), mask=mask, ids=sequence_ids, size=size)
    return ~((advantages < 0) & (drift > delta)[sequence_ids])


@runtime_checkable
class Correction(Component, Protocol):
    """One factor per token, (N,), without gradient."""

    def __call__(self, batch: TokenBatch) -> Tensor: ...

    @property
    def mismatch(self) -> bool:
        """Whether it corrects for kappa, which a ratio against the sampler already contains."""
        return True

    def log_of_sequence(self, factor: Tensor, *, batch: TokenBatch) -> Tensor:
        """(N,) log of the factor of each token's sequence: of the product of its tokens' factors, 0 counted as 1e-8."""
        log_c = torch.where(batch.mask, factor.clamp(min=1e-8).log(), 0.0)
        return segment_sum(log_c, ids=batch.sequence_ids, size=batch.size)[batch.sequence_ids]


def _kappa(batch: TokenBatch, level: str) -> Tensor:
    assert batch.rollout_logprobs is not None
    # Against ``old``, not the current policy: kappa stays the same through all updates on a step's rollouts. How far
    # the policy moves in them is the ratio's part.
    log_kappa = batch.old - batch.rollout_logprobs
    if level == "token":
        return bounded_exp(log_kappa)
    ratio = product_ratio if level == "sequence" else geometric_ratio
    return ratio(log_kappa, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)


@dataclass(frozen=True)
class Bounded(Correction):
    """A correction by kappa itself, within limits."""

    low: float = 0.0
    high: float = 2.0
    level: str = "token"
    scope: ClassVar[Scope] = "sequence"

    def __post_init__(self) -> None:
        one_of(("token", "sequence"), level=self.level)
        if not 0 <= self.low < self.high:
            raise ValueError(
                f"correction_low, correction_high: got {self.low!r} and {self.high!r}, accepts 0 <= low < high"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rollout_logprobs",)

    def log_of_sequence(self, factor: Tensor, *, batch: TokenBatch) -> Tensor:
        if self.level == "token":
            return super().log_of_sequence(factor, batch=batch)
        return factor.clamp(min=1e-8).log()  # one factor for the whole sequence already: not to be multiplied T times

    def limited(self, batch: TokenBatch) -> Bool[Tensor, "N"]:
        """Where kappa is beyond the limits, so that c is not kappa."""
        kappa = _kappa(batch, self._judged)
        return (kappa < self.low) | (kappa > self.high)

    @property
    def _judged(self) -> str:
        """The level of the kappa that the limits are for."""
        return self.level

    @property
    def _shown(self) -> str:
        return "kappa_t" if self.level == "token" else "prod_t kappa_t"


@dataclass(frozen=True)
class TruncatedImportance(Bounded):
    """c = clip(kappa, low, high), of the token (:func:`truncated_importance`) or of the sequence's product: TIS."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return _kappa(batch, self.level).clamp(self.low, self.high)

    def equation(self) -> str:
        clipped = (
            f"clip({self._shown}, {self.low:g}, {self.high:g})" if self.low else f"min({self._shown}, {self.high:g})"
        )
        return f"c_t = {clipped}      kappa_t = pi_old(y_t) / mu(y_t)"


@dataclass(frozen=True)
class MaskedImportance(Bounded):
    """c = kappa where low <= kappa <= high, else 0, of the token or of the sequence's product: MIS. Per token within
    [0.5, 5] it is IcePop, arXiv 2510.18855."""

    high: float = 3.0
    level: str = "sequence"

    def __call__(self, batch: TokenBatch) -> Tensor:
        # Outside the range tokens are dropped instead of clipped: so large a mismatch is discarded, not corrected.
        kappa = _kappa(batch, self.level)
        return torch.where((kappa >= self.low) & (kappa <= self.high), kappa, 0.0)

    def equation(self) -> str:
        k = self._shown
        return f"c_t = {k} if {self.low:g} <= {k} <= {self.high:g}, else 0      kappa_t = pi_old(y_t) / mu(y_t)"


@dataclass(frozen=True)
class GeometricMask(Bounded):
    """c_t = kappa_t where the geometric mean of the sequence's kappa is within [low, high], else 0: Geo-RS."""

    low: float = 0.999
    high: float = 1.002

    @property
    def _judged(self) -> str:
        return "geometric"

    def __call__(self, batch: TokenBatch) -> Tensor:
        mean = _kappa(batch, "geometric")
        return torch.where((mean >= self.low) & (mean <= self.high), _kappa(batch, "token"), 0.0)

    def equation(self) -> str:
        return (
            f"c_t = kappa_t if {self.low:g} <= geometric mean of kappa <= {self.high:g}, else 0      "
            "kappa_t = pi_old(y_t) / mu(y_t)"
        )


@dataclass(frozen=True)
class OffPolicySequenceMask(Correction):
    """:func:`off_policy_sequences` as a component: against the sampler's log-probs where given, otherwise against the
    old policy's."""

    delta: float = 0.5
    scope: ClassVar[Scope] = "sequence"

    def __post_init__(self) -> None:
        positive(delta=self.delta)

    @property
    def mismatch(self) -> bool:
        # It judges how far the policy has moved: beside a ratio against the sampler, nothing counts twice.
        return False

    def __call__(self, batch: TokenBatch) -> Tensor:
        assert batch.advantages is not None
        trained_on = off_policy_sequences(
            batch.logprobs,
            behaviour_logprobs=batch.old if batch.rollout_logprobs is None else batch.rollout_logprobs,
            advantages=batch.advantages, mask=batch.mask, sequence_ids=batch.sequence_ids, size=batch.size,
            delta=self.delta,
        )  # fmt: skip
        return trained_on.to(batch.policy.dtype)

    def equation(self) -> str:
        return f"c_t = 0 if A < 0 and mean_t log(mu / pi) > {self.delta:g}, else 1"
