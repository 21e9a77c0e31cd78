"""Baselines, subtracted from rewards. Rewards are float64 here; NaN marks a sequence that takes no part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope
from .segments import dense_ids, group_mean, segment_count, segment_sum


def leave_one_out_mean(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """b_i = mean of the other rewards of i's group: RLOO, arXiv 2402.14740. R_i - b_i = G/(G-1) (R_i - mean R).

    A group of one has no others: b_i is then its own reward, so that the difference is 0.

    >>> leave_one_out_mean(torch.tensor([1., 0., 0.]), group_ids=torch.tensor([0, 0, 0])).tolist()
    [0.0, 0.5, 0.5]
    """
    ids, size = dense_ids(group_ids)
    count = segment_count(~rewards.isnan(), ids=ids, size=size)[ids]
    total = segment_sum(rewards.nan_to_num(0.0), ids=ids, size=size)[ids]
    return torch.where(count > 1, (total - rewards) / (count - 1).clamp(min=1), rewards)


def length_weighted_mean(
    rewards: Float[Tensor, "S"], *, lengths: Int[Tensor, "S"], group_ids: Int[Tensor, "S"]
) -> Float[Tensor, "S"]:
    """b = sum_i T_i R_i / sum_i T_i within the group: OPO, arXiv 2505.23585. 0 if a group has no tokens.

    >>> l, ids = torch.tensor([100, 300]), torch.tensor([0, 0])
    >>> length_weighted_mean(torch.tensor([1., 0.]), lengths=l, group_ids=ids).tolist()
    [0.25, 0.25]
    """
    ids, size = dense_ids(group_ids)
    # A missing reward leaves numerator and denominator: its tokens would otherwise count as reward 0.
    weight = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    total = segment_sum(weight * rewards.nan_to_num(0.0), ids=ids, size=size)
    return (total / segment_sum(weight, ids=ids, size=size)).nan_to_num(0.0)[ids]


def best_of_others(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """b_i = min(R_i, the largest of the other rewards of i's group), so that R_i - b_i is the lead of the best
    completion and 0 for all others: arXiv 2503.19595, whose A_i is max_j R_j - max_(j != i) R_j.

    A group of one has no others: b_i is then its own reward. Two that share the maximum lead by 0.

    >>> best_of_others(torch.tensor([1., 0.25, 0.]), group_ids=torch.tensor([0, 0, 0])).tolist()
    [0.25, 0.25, 0.0]
    """
    ids, size = dense_ids(group_ids)
    known = torch.where(rewards.isnan(), -torch.inf, rewards)
    lowest = torch.full((size,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    best = lowest.scatter_reduce(0, ids, known, "amax")[ids]
    # The runner-up is the best of those below the best, unless several share the maximum.
    shared = segment_count(known == best, ids=ids, size=size)[ids] > 1
    second = lowest.scatter_reduce(0, ids, torch.where(known < best, known, -torch.inf), "amax")[ids]
    others = torch.where((known == best) & ~shared, second, best)
    return torch.where(others.isfinite(), torch.minimum(rewards, others), rewards)


@runtime_checkable
class Baseline(Component, Protocol):
    """The baseline of each reward, (S,), from rewards (S,)."""

    scope: ClassVar[Scope] = "group"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class NoBaseline(Baseline):
    """b = 0."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return torch.zeros_like(rewards)

    def equation(self) -> str:
        return "R_i"


@dataclass(frozen=True)
class GroupMean(Baseline):
    """b = mean(R) over the group."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return group_mean(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - mean(R)"


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """:func:`leave_one_out_mean` as a component."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return leave_one_out_mean(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - mean(R of the others)"


@dataclass(frozen=True)
class BestOfOthers(Baseline):
    """:func:`best_of_others` as a component."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return best_of_others(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - min(R_i, max(R of the others))"


@dataclass(frozen=True)
class BatchMean(Baseline):
    """b = mean(R) over the whole step."""

    scope: ClassVar[Scope] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return rewards.nanmean().expand_as(rewards)

    def equation(self) -> str:
        return "R_i - mean(R of the batch)"


@dataclass(frozen=True)
class Greedy(Baseline):
    """b = the reward of the greedy answer to the same prompt: ReMax, arXiv 2310.10505."""

    scope: ClassVar[Scope] = "sequence"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("baselines",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.baselines is not None
        return batch.baselines.to(rewards)

    def equation(self) -> str:
        return "R_i - R(greedy answer)"


@dataclass(frozen=True)
class LengthWeighted(Baseline):
    """:func:`length_weighted_mean` as a component."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return length_weighted_mean(rewards, lengths=batch.lengths, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - sum_j(T_j R_j) / sum_j(T_j)"
