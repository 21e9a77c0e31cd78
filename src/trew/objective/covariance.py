"""Clip-Cov and KL-Cov: hold back tokens whose log-probability and advantage rise together, which drives entropy down.

Both need the whole batch: which tokens they choose depends on all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .batch import TokenBatch
from .component import Scope, not_negative, share_of
from .divergence import Divergence
from .ratio import LOG_RATIO_LIMIT, log_ratio
from .weight import Clip, Weight

ROUNDING = 1e-5
"""Log-ratios within this count as 0: two computations of the same log-probability differ by as much."""


def covariance(
    logprobs: Float[Tensor, "N"], *, advantages: Float[Tensor, "N"], mask: Bool[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """cov_t = (A_t - mean A)(log pi_t - mean log pi), means over the tokens of ``mask``: arXiv 2505.22617 eq. 10.

    >>> l, a = torch.tensor([-.1, -2., -.1, -2.]), torch.tensor([1., 1., -1., -1.])
    >>> [round(c, 4) for c in covariance(l, advantages=a, mask=torch.ones(4, dtype=torch.bool)).tolist()]
    [0.95, -0.95, -0.95, 0.95]
    """
    # Sums in float64: both means are over all tokens of the step.
    count = mask.sum().clamp(min=1)
    mean_a = torch.where(mask, advantages, 0.0).sum(dtype=torch.float64) / count
    mean_l = torch.where(mask, logprobs.detach(), 0.0).sum(dtype=torch.float64) / count
    return (advantages - mean_a.to(advantages)) * (logprobs.detach() - mean_l.to(logprobs))


def tokens_of(share: float, mask: Tensor) -> int:
    """max(1, floor(share N)), N the tokens of ``mask``, as in the authors' code."""
    return max(1, int(share * int(mask.sum())))


def _seed_of(batch: TokenBatch, seed: int) -> int:
    """A seed that follows from ``seed`` and from what was sampled, in any order of sequences. Only what is recorded
    counts: what is computed anew may round otherwise on another number of ranks. Of rewards their order, which decides
    advantages, and of tokens those with a loss."""
    present = batch.lengths > 0  # without a loss, or without a reward, a completion counts as one that is not there
    size = batch.lengths[present].square()
    if batch.rewards is not None:
        rewards = batch.rewards if batch.rewards.ndim == 2 else batch.rewards[:, None]
        for column in rewards.detach()[present].nan_to_num(-torch.inf).unbind(1):
            size = size * (2 + column.unique(return_inverse=True)[1])
    found = seed + int(size.sum())
    if batch.rollout_logprobs is not None:
        sampled = batch.rollout_logprobs.detach()[batch.mask].cpu().float()
        found += 127 * int(sampled.view(torch.int32).long().sum())
    return found % 2**63


@dataclass(frozen=True)
class ClipCov(Weight):
    """PPO's clip, and w = 0 for max(1, share N) tokens drawn from those that are not clipped and whose covariance is
    between ``cov_low`` and ``cov_high``: Clip-Cov, arXiv 2505.22617 eq. 11.

    The draw depends on ``seed``, on what was sampled, and on the tokens' values, but not on their order: other
    completions get another draw, and the same ones the same, on any device and number of ranks.
    """

    eps_low: float = 1.0
    eps_high: float = 1.0
    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: int = 0
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        # Made only to check the numbers.
        Clip(self.eps_low, self.eps_high)
        share_of(share=self.share)
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low: got {self.cov_low!r}, accepts a number below cov_high = {self.cov_high:g}")

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        w = Clip(self.eps_low, self.eps_high)(ratio, advantages=advantages, batch=batch)
        if not self.share:
            return w
        cov = covariance(batch.logprobs, advantages=advantages, mask=batch.mask)
        candidates = ((w > 0) & batch.mask & (cov > self.cov_low) & (cov < self.cov_high)).nonzero().squeeze(1)
        # Ranked by value before the draw, so that the order of sequences does not change which tokens are drawn.
        ranked = candidates[torch.argsort(cov[candidates], stable=True)]
        # On the CPU: the same draw on every device.
        generator = torch.Generator().manual_seed(_seed_of(batch, self.seed))
        drawn = torch.randperm(len(ranked), generator=generator)[: tokens_of(self.share, batch.mask)]
        w[ranked[drawn.to(ranked.device)]] = 0.0
        return w

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        clip = Clip(self.eps_low, self.eps_high)
        # A drawn token has w = 0 if the clip alone has not, and reports 0; a clipped one keeps the clip's value.
        not_drawn = (self(ratio, advantages=advantages, batch=batch) > 0) | (
            clip(ratio, advantages=advantages, batch=batch) == 0
        )
        return torch.where(not_drawn, clip.surrogate(ratio, advantages=advantages, batch=batch), 0.0)

    def equation(self) -> str:
        clip = Clip(self.eps_low, self.eps_high).equation()
        return (
            f"{clip}; and 0 for {self.share:g} of all tokens, drawn from those with {self.cov_low:g} < cov < "
            f"{self.cov_high:g}      cov_t = (A_t - mean A)(log pi_t - mean log pi)"
        )


@dataclass(frozen=True)
class CovariancePenalty(Divergence):
    """+ penalty share_t |log(pi / pi_old)| on the max(1, share N) tokens with the highest covariance: KL-Cov,
    arXiv 2505.22617 eq. 12, with the estimate of the authors' code. Its derivative is the sign of log(pi / pi_old)."""

    penalty: float = 1.0
    share: float = 2e-3
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        not_negative(penalty=self.penalty)
        share_of(share=self.share)

    @property
    def active(self) -> bool:
        return self.penalty > 0 and self.share > 0

    def _picked(self, batch: TokenBatch) -> Tensor:
        assert batch.advantages is not None
        cov = covariance(batch.logprobs, advantages=batch.advantages, mask=batch.mask)
        cov = torch.where(batch.mask, cov, -torch.inf)  # never among the highest
        # tokens_of() is 1 at least, also in a step without loss tokens.
        count = min(tokens_of(self.share, batch.mask), int(batch.mask.sum()))
        picked = torch.zeros_like(batch.mask)
        picked[cov.topk(count).indices] = True
        return picked

    def value(self, batch: TokenBatch) -> Tensor:
        size = log_ratio(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).abs()
        return torch.where(self._picked(batch), self.penalty * size, 0.0)

    def derivative(self, batch: TokenBatch) -> Tensor:
        log_r = log_ratio(batch)
        moved = log_r.abs() > ROUNDING  # the sign of a rounding error would be a full penalty before the first update
        return torch.where(self._picked(batch) & moved, self.penalty * log_r.sign(), 0.0)

    def equation(self) -> str:
        return (
            f"+ {self.penalty:g} share_t |log(pi / pi_old)| on the {self.share:g} of all tokens with the highest cov"
            "      cov_t = (A_t - mean A)(log pi_t - mean log pi)"
        )
