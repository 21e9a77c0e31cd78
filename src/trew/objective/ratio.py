"""The importance ratio: how far the policy has moved. It never has a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope, one_of, positive
from .segments import segment_mean, segment_sum

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp: a ratio is 5e8 there, and no trust region tells larger ones apart.
Unclamped, float32 would overflow at 88, and a clipped token would have inf * 0 = NaN."""


def bounded_exp(log_ratio: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """exp of a log-ratio clamped to ± ``LOG_RATIO_LIMIT``."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_ratio(logprobs: Float[Tensor, "N"], *, anchor_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """r_t = pi_theta(y_t) / pi_anchor(y_t): PPO, arXiv 1707.06347, eq. 6.

    >>> token_ratio(torch.tensor([0.9]).log(), anchor_logprobs=torch.tensor([0.5]).log())
    tensor([1.8000])
    """
    return bounded_exp(logprobs.detach() - anchor_logprobs)


def geometric_ratio(
    log_ratio: Float[Tensor, "N"], *, mask: Bool[Tensor, "N"], ids: Int[Tensor, "N"], size: int
) -> Float[Tensor, "N"]:
    """s_i = exp(mean_t log r_t) of each token's sequence: GSPO, arXiv 2507.18071, eq. 7.

    >>> ids, m = torch.tensor([0, 0]), torch.tensor([True, True])
    >>> round(geometric_ratio(torch.tensor([.5, -.1]), mask=m, ids=ids, size=1)[0].item(), 4)
    1.2214
    """
    # (S,) -> (N,): a sequence's ratio at each of its tokens. The mean is bounded, not each log-ratio.
    return bounded_exp(segment_mean(log_ratio, mask=mask, ids=ids, size=size))[ids]


def product_ratio(
    log_ratio: Float[Tensor, "N"], *, mask: Bool[Tensor, "N"], ids: Int[Tensor, "N"], size: int
) -> Float[Tensor, "N"]:
    """S_i = prod_t r_t of each token's sequence: the exact ratio of two sequences' probabilities.

    >>> ids, m = torch.tensor([0, 0]), torch.tensor([True, True])
    >>> round(product_ratio(torch.tensor([.5, -.1]), mask=m, ids=ids, size=1)[0].item(), 4)
    1.4918
    """
    return bounded_exp(segment_sum(torch.where(mask, log_ratio, 0.0), ids=ids, size=size))[ids]


@runtime_checkable
class Ratio(Component, Protocol):
    """One ratio per token. ``anchor`` is the policy that it is measured against: "old" (the trainer's log-probs of when
    the rollout was made) or "rollout" (the sampler's own log-probs).

    ``per_sequence``: the ratio is one number for the sequence, and its derivative by each log pi_t is that number; the
    surrogate's value then counts once per sequence and not once per token.
    """

    anchor: str = "old"
    per_sequence: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch) -> Tensor: ...


def log_ratio(batch: TokenBatch, *, anchor: str = "old") -> Float[Tensor, "N"]:
    """log pi - log pi_anchor; exactly 0 against the old policy if the batch has no ``old_logprobs``."""
    if anchor == "old":
        return batch.policy - batch.old
    assert batch.rollout_logprobs is not None
    return batch.policy - batch.rollout_logprobs


@dataclass(frozen=True)
class NoRatio(Ratio):
    """r = 1: the plain policy gradient, exact as long as the current policy is the one that sampled."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return torch.ones_like(batch.policy)

    def equation(self) -> str:
        return "r_t = 1"


@dataclass(frozen=True)
class _Anchored(Ratio):
    anchor: str = "old"

    def __post_init__(self) -> None:
        one_of(("old", "rollout"), anchor=self.anchor)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rollout_logprobs",) if self.anchor == "rollout" else ()

    @property
    def _shown(self) -> str:
        return f"pi(y_t) / {'pi_old' if self.anchor == 'old' else 'mu'}(y_t)"


@dataclass(frozen=True)
class TokenRatio(_Anchored):
    """:func:`token_ratio` as a component; exactly 1 if the batch has no ``old_logprobs``."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return bounded_exp(log_ratio(batch, anchor=self.anchor))

    def equation(self) -> str:
        return f"r_t = {self._shown}"


@dataclass(frozen=True)
class GeometricRatio(_Anchored):
    """:func:`geometric_ratio` as a component."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, batch: TokenBatch) -> Tensor:
        log_r = log_ratio(batch, anchor=self.anchor)
        return geometric_ratio(log_r, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)

    def equation(self) -> str:
        return f"r_t = s_i = exp(mean_t log {self._shown})"


@dataclass(frozen=True)
class ProductRatio(_Anchored):
    """:func:`product_ratio` as a component."""

    scope: ClassVar[Scope] = "sequence"
    per_sequence: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch) -> Tensor:
        log_r = log_ratio(batch, anchor=self.anchor)
        return product_ratio(log_r, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)

    def equation(self) -> str:
        return f"r_t = S_i = prod_t {self._shown}"


@dataclass(frozen=True)
class ClippedGeometricRatio(Ratio):
    """exp(mean_t of clipped log r_t) of the sequence: GMPO, arXiv 2507.20673, eq. 4.

    log r_t is clipped at eps_high where A > 0 and at -eps_low where A < 0, before the mean is taken.
    """

    eps_low: float = 0.4
    eps_high: float = 0.4
    scope: ClassVar[Scope] = "sequence"

    def __post_init__(self) -> None:
        positive(eps_low=self.eps_low, eps_high=self.eps_high)

    def __call__(self, batch: TokenBatch) -> Tensor:
        assert batch.advantages is not None
        log_r = log_ratio(batch)
        # One-sided, as in PPO's minimum: a move against the sign of A is never cut.
        cut = torch.where(batch.advantages > 0, log_r.clamp(max=self.eps_high), log_r.clamp(min=-self.eps_low))
        return geometric_ratio(cut, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)

    def equation(self) -> str:
        return (
            f"r_t = exp(mean_t l_t), l_t = min(log r, {self.eps_high:g}) if A > 0, max(log r, -{self.eps_low:g}) if "
            "A < 0      r = pi(y_t) / pi_old(y_t)"
        )
