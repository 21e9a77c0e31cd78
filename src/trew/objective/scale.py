"""What the difference of reward and baseline is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import DataError
from .batch import TokenBatch
from .component import Component, Scope, not_negative, one_of
from .renamed import refuse
from .segments import dense_ids, group_mean, group_std


def beta_density(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """f_N(p; alpha, beta), the Beta density at the group's success rate p = mean(R): BNPO, arXiv 2506.02864.

        k = m (1 - m) / v - 1,   a = k m,   b = k (1 - m),   alpha = max(1 + a/3, 1),   beta = max(1 + b/3, 1)

    with m and v the mean and sample variance of p over the batch's groups. Without variance no Beta distribution can be
    fitted: alpha = beta = 1, density 1. The density is at least 1e-6, so that 1 / f_N <= 1e6.

    >>> r = torch.tensor([1., 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    >>> [round(f, 6) for f in beta_density(r, group_ids=torch.arange(3).repeat_interleave(4))[::4].tolist()]
    [1.102658, 1.27324, 1.102658]
    """
    p = group_mean(rewards, group_ids=group_ids)
    ids, size = dense_ids(group_ids)
    # (S,) -> (groups,): the fit is over groups, of which each counts once however many completions it has.
    per_group = torch.full((size,), torch.nan, dtype=p.dtype, device=p.device).scatter(0, ids, p)
    known = per_group[~per_group.isnan()]
    mean, variance = known.mean(), known.var() if len(known) > 1 else known.new_zeros(())
    k = mean * (1 - mean) / variance - 1  # method of moments; inf without variance, and then not used
    fitted = variance > 1e-12
    alpha = torch.where(fitted, 1 + k * mean / 3, 1.0).clamp(min=1.0)
    beta = torch.where(fitted, 1 + k * (1 - mean) / 3, 1.0).clamp(min=1.0)
    norm = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    # xlogy(0, 0) = 0: at p = 0 and p = 1 a plain product would be 0 * -inf = NaN.
    log_density = torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p) - norm
    return log_density.exp().clamp(min=1e-6)


@runtime_checkable
class Scale(Component, Protocol):
    """The divisor of each advantage, (S,), from rewards (S,)."""

    scope: ClassVar[Scope] = "group"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class NoScaling(Scale):
    """scale = 1."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return torch.ones_like(rewards)

    def equation(self) -> str:
        return ""


@dataclass(frozen=True)
class _Deviation(Scale):
    ddof: int = 1
    std_eps: float = 0.0

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof: got {self.ddof!r}, accepts 0 (population) or 1 (sample)")
        not_negative(std_eps=self.std_eps)

    def _shown(self, name: str) -> str:
        return f"({name} + {self.std_eps:g})" if self.std_eps else name


@dataclass(frozen=True)
class GroupStd(_Deviation):
    """scale = std(R) over the group + std_eps. ``ddof = 1`` is the sample deviation, which public implementations use;
    the papers do not say which."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return group_std(rewards, group_ids=batch.group_ids, ddof=self.ddof) + self.std_eps

    def equation(self) -> str:
        return f" / {self._shown('std(R)')}      std with ddof = {self.ddof}; 0 where all R are equal"


@dataclass(frozen=True)
class BatchStd(_Deviation):
    """scale = std over all rewards of the step, not centred within groups, + std_eps: Lite-PPO, arXiv 2508.08221."""

    scope: ClassVar[Scope] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        one = torch.zeros_like(batch.group_ids)
        return group_std(rewards, group_ids=one, ddof=self.ddof) + self.std_eps

    def equation(self) -> str:
        return f" / {self._shown('std(R of the batch)')}      std with ddof = {self.ddof}; 0 where all R are equal"


@dataclass(frozen=True)
class AdvantageStd(_Deviation):
    """scale = std over the step of the rewards centred within their groups, + std_eps: ScaleRL, arXiv 2510.13786.

    Unlike :class:`BatchStd` it leaves out the spread between prompts, so it is never the larger one.
    """

    scope: ClassVar[Scope] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        one = torch.zeros_like(batch.group_ids)  # the whole step as one group
        centred = rewards - group_mean(rewards, group_ids=batch.group_ids)
        return group_std(centred, group_ids=one, ddof=self.ddof) + self.std_eps

    def equation(self) -> str:
        shown = self._shown("std(R - mean(R) of the batch)")
        return f" / {shown}      std with ddof = {self.ddof}; 0 where all R are equal"


@dataclass(frozen=True)
class MeanReward(Scale):
    """scale = mean(R) over the group, for rewards of at least 0: MaxRL, arXiv 2602.02710. No signal where it is 0."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        mean = group_mean(rewards, group_ids=batch.group_ids)
        # Rewards of both signs can cancel: the rounding error that is left is no mean to divide by.
        above = mean > 1e-6 * group_mean(rewards.abs(), group_ids=batch.group_ids)
        return torch.where(above, mean, torch.inf)  # x / inf = 0: no advantage

    def equation(self) -> str:
        return " / mean(R)      0 where mean(R) <= 0"


@dataclass(frozen=True)
class BetaDensity(Scale):
    """:func:`beta_density` as a component, for rewards from 0 to 1."""

    scope: ClassVar[Scope] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        known = rewards[~rewards.isnan()]
        if len(known) and not (known.min() >= 0 and known.max() <= 1):
            raise DataError(
                f"rewards: got {float(known.min()):g} to {float(known.max()):g}, accepts 0 to 1 here (what is added to "
                "them counts): the scale is a Beta density at their mean"
            )
        return beta_density(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return " / Beta(mean(R); alpha, beta)      alpha, beta fitted to the group means of the batch"


if not TYPE_CHECKING:
    __getattr__ = refuse(__name__, {"Unit": "NoScaling"})


def group_scale(scale: str, ddof: int, std_eps: float) -> Scale:
    """The scale that a preset's options name: "std" divides by the group's deviation, "none" by nothing.

    Raises ValueError for another name, and for ``ddof`` or ``std_eps`` that "none" would not read.
    """
    one_of(("std", "none"), scale=scale)
    if scale == "std":
        return GroupStd(ddof, std_eps)
    if (ddof, std_eps) != (1, 0.0):
        raise ValueError(f"scale: got 'none' with ddof = {ddof} and std_eps = {std_eps:g}, accepts 'std' with those")
    return NoScaling()
