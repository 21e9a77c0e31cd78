"""Reward -> advantage: a baseline taken off, and a scale divided out.

    A_i = (R_i - baseline_i) / scale_i

Baselines and scales are values of their own, since RLOO, Lite-PPO, MaxRL and others differ in nothing else. Rewards are
float64 here; NaN marks a sequence that takes no part, its advantage is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import DataError
from .batch import TokenBatch
from .piece import Coupling, Piece, not_negative
from .segments import dense_ids, group_mean, group_std, has_signal, segment_count, segment_sum, standardize


def leave_one_out_mean(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """b_i = mean of the other rewards of i's group: RLOO, arXiv 2402.14740. R_i - b_i = G/(G-1) (R_i - mean R).

    A group of one has no others: its own reward, so that nothing is left.

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
    """b = sum_i T_i R_i / sum_i T_i within the group: OPO, arXiv 2505.23585. 0 where a group has no tokens.

    >>> l, ids = torch.tensor([100, 300]), torch.tensor([0, 0])
    >>> length_weighted_mean(torch.tensor([1., 0.]), lengths=l, group_ids=ids).tolist()
    [0.25, 0.25]
    """
    ids, size = dense_ids(group_ids)
    weight = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    total = segment_sum(weight * rewards.nan_to_num(0.0), ids=ids, size=size)
    return (total / segment_sum(weight, ids=ids, size=size)).nan_to_num(0.0)[ids]


def beta_density(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """f_N(p; alpha, beta), the Beta density at the group's success rate p = mean(R): BNPO, arXiv 2506.02864.

        k = m (1 - m) / v - 1,   a = k m,   b = k (1 - m),   alpha = max(1 + a/3, 1),   beta = max(1 + b/3, 1)

    with m and v the mean and sample variance of p over the batch's groups. Where these have no variance there is no
    Beta distribution to be fitted: alpha = beta = 1, density 1. Bounded from below so that 1 / f_N <= 1e6.

    >>> r = torch.tensor([1., 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    >>> [round(f, 6) for f in beta_density(r, group_ids=torch.arange(3).repeat_interleave(4))[::4].tolist()]
    [1.102658, 1.27324, 1.102658]
    """
    p = group_mean(rewards, group_ids=group_ids)
    ids, size = dense_ids(group_ids)
    per_group = torch.full((size,), torch.nan, dtype=p.dtype, device=p.device).scatter(0, ids, p)
    known = per_group[~per_group.isnan()]
    mean, variance = known.mean(), known.var() if len(known) > 1 else known.new_zeros(())
    k = mean * (1 - mean) / variance - 1
    fitted = variance > 1e-12
    alpha = torch.where(fitted, 1 + k * mean / 3, 1.0).clamp(min=1.0)
    beta = torch.where(fitted, 1 + k * (1 - mean) / 3, 1.0).clamp(min=1.0)
    norm = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_density = torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p) - norm
    return log_density.exp().clamp(min=1e-6)


def pass_at_k(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], k: int) -> Float[Tensor, "S"]:
    """Advantages of 0/1 ``rewards`` whose expected gradient raises the chance that one of k answers is right.

        Rbar = 1 - C(N-, k) / C(N, k),   s = sqrt(Rbar (1 - Rbar)),
        A+ = (1 - Rbar) / s,   A- = (1 - Rbar - C(N- - 1, k - 1) / C(N - 1, k - 1)) / s

    Pass@k Training, arXiv 2508.10751. k = 1 is GRPO with the population deviation. 0 where s = 0.

    >>> r = torch.tensor([1., 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    >>> [round(a, 6) for a in pass_at_k(r, group_ids=torch.zeros(8, dtype=torch.int64), k=4)[:2].tolist()]
    [1.0, -0.142857]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    n = segment_count(known, ids=ids, size=size).to(torch.float64)
    wrong = segment_count(known & (rewards <= 0), ids=ids, size=size).to(torch.float64)

    def all_wrong(wrong: Tensor, n: Tensor, k: int) -> Tensor:
        """C(wrong, k) / C(n, k): the chance that k of n answers, drawn without putting back, are all wrong."""
        chance = torch.ones_like(n)
        for j in range(k):
            chance = chance * ((wrong - j).clamp(min=0) / (n - j).clamp(min=1))
        return chance

    miss = all_wrong(wrong, n, k)
    s = (miss * (1 - miss)).sqrt()
    right = miss / s
    bad = (miss - all_wrong(wrong - 1, n - 1, k - 1)) / s
    advantage = torch.where(rewards > 0, right[ids], bad[ids])
    return torch.where(known & (s > 0)[ids] & (n >= k)[ids], advantage, 0.0)


@runtime_checkable
class Baseline(Piece, Protocol):
    """What a reward is compared with: (S,) from (S,)."""

    couples: ClassVar[Coupling] = "group"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...


@runtime_checkable
class Scale(Piece, Protocol):
    """The unit of an advantage: (S,) from (S,)."""

    couples: ClassVar[Coupling] = "group"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...


@runtime_checkable
class Advantage(Piece, Protocol):
    """Advantages, one per sequence or one per token, from rewards (S,): 0 for sequences whose reward is NaN."""

    couples: ClassVar[Coupling] = "group"
    reads_rewards: ClassVar[bool] = True  # False: nothing that is added to the reward can have an effect
    per_token: ClassVar[bool] = False  # True: returns (N,)
    per_reward: ClassVar[bool] = False  # True: is given the rewards (S, K) one by one, unweighted

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class NoBaseline(Baseline):
    """b = 0."""

    couples: ClassVar[Coupling] = "sequence"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return torch.zeros_like(rewards)

    def equation(self) -> str:
        return "R_i"


@dataclass(frozen=True)
class GroupMean(Baseline):
    """b = mean(R) of the group."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return group_mean(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - mean(R)"


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """:func:`leave_one_out_mean` as a value."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return leave_one_out_mean(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - mean(R of the others)"


@dataclass(frozen=True)
class BatchMean(Baseline):
    """b = mean(R) of the whole step."""

    couples: ClassVar[Coupling] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return rewards.nanmean().expand_as(rewards)

    def equation(self) -> str:
        return "R_i - mean(R of the batch)"


@dataclass(frozen=True)
class Greedy(Baseline):
    """b = the reward of the greedy answer to the same prompt: ReMax, arXiv 2310.10505."""

    couples: ClassVar[Coupling] = "sequence"

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
    """:func:`length_weighted_mean` as a value."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return length_weighted_mean(rewards, lengths=batch.lengths, group_ids=batch.group_ids)

    def equation(self) -> str:
        return "R_i - sum_j(T_j R_j) / sum_j(T_j)"


@dataclass(frozen=True)
class Unit(Scale):
    """scale = 1."""

    couples: ClassVar[Coupling] = "sequence"

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
    """scale = std(R) of the group + std_eps. ``ddof = 1`` is the sample deviation, which the public implementations
    use; the papers do not say."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return group_std(rewards, group_ids=batch.group_ids, ddof=self.ddof) + self.std_eps

    def equation(self) -> str:
        return f" / {self._shown('std(R)')}      std with ddof = {self.ddof}; 0 where all R are equal"


@dataclass(frozen=True)
class BatchStd(_Deviation):
    """scale = std of all rewards of the step, as they are (not centred), + std_eps: Lite-PPO, arXiv 2508.08221."""

    couples: ClassVar[Coupling] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        one = torch.zeros_like(batch.group_ids)
        return group_std(rewards, group_ids=one, ddof=self.ddof) + self.std_eps

    def equation(self) -> str:
        return f" / {self._shown('std(R of the batch)')}      std with ddof = {self.ddof}; 0 where all R are equal"


@dataclass(frozen=True)
class MeanReward(Scale):
    """scale = mean(R) of the group, for rewards of 0 and above: MaxRL, arXiv 2602.02710. No signal where it is 0."""

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        mean = group_mean(rewards, group_ids=batch.group_ids)
        return torch.where(mean > 0, mean, torch.inf)

    def equation(self) -> str:
        return " / mean(R)      0 where mean(R) <= 0"


@dataclass(frozen=True)
class BetaDensity(Scale):
    """:func:`beta_density` as a value."""

    couples: ClassVar[Coupling] = "batch"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return beta_density(rewards, group_ids=batch.group_ids)

    def equation(self) -> str:
        return " / Beta(mean(R); alpha, beta)      alpha, beta fitted to the group means of the batch"


@dataclass(frozen=True)
class Relative(Advantage):
    """A_i = (R_i - baseline_i) / scale_i.

    With a baseline taken from the group, groups whose rewards are all equal (and groups of one) have advantage exactly
    0, whatever rounding leaves.
    """

    baseline: Baseline = field(default_factory=GroupMean)
    scale: Scale = field(default_factory=Unit)
    couples: ClassVar[Coupling] = "batch"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", *self.baseline.needs, *self.scale.needs)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        centred = rewards - self.baseline(rewards, batch=batch)
        if self.baseline.couples in ("group", "batch"):
            ids = batch.group_ids if self.baseline.couples == "group" else torch.zeros_like(batch.group_ids)
            centred = torch.where(has_signal(rewards, group_ids=ids), centred, 0.0)
        return (centred / self.scale(rewards, batch=batch)).nan_to_num(0.0, 0.0, 0.0)

    def equation(self) -> str:
        scale = self.scale.equation()
        difference = self.baseline.equation()
        return f"A_i = ({difference}){scale}" if scale and " " in difference else f"A_i = {difference}{scale}"


@dataclass(frozen=True)
class PassAtK(Advantage):
    """:func:`pass_at_k` as a value, on which answers are correct."""

    k: int = 4
    reads_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k!r}, accepts a whole number of at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        largest = int(torch.unique(batch.group_ids, return_counts=True)[1].max()) if batch.size else self.k
        if largest < self.k:
            raise DataError(f"k: got {self.k}, but no group has more than {largest} completions; lower k")
        judged = torch.where(rewards.isnan(), rewards, batch.is_correct.to(rewards.dtype))
        return pass_at_k(judged, group_ids=batch.group_ids, k=self.k)

    def equation(self) -> str:
        return (
            f"A+ = (1 - p) / s, A- = (1 - p - q) / s      p: one of {self.k} is right, s = sqrt(p (1 - p)), "
            f"q: the {self.k - 1} drawn with a wrong one are wrong"
        )


@dataclass(frozen=True)
class Given(Advantage):
    """Advantages come from outside, from a critic for instance; there is no rule that makes them from rewards."""

    couples: ClassVar[Coupling] = "token"
    reads_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("advantages",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        raise DataError("advantages: got None; this objective takes them from outside (a critic): pass advantages")

    def equation(self) -> str:
        return "A_t given"


@dataclass(frozen=True)
class PerReward(Advantage):
    """A_i = z( sum_k weight_k (R_ik - mean_k) / (std_k + std_eps) ): GDPO, arXiv 2601.05242.

    Each reward is normalised in its own group, over the completions to which it applies; z is the z-score over all
    sequences of the step. Equal rewards everywhere give exactly 0; but z re-centres: one group without signal among
    others gets minus the batch's mean.
    """

    ddof: int = 1
    std_eps: float = 0.0
    couples: ClassVar[Coupling] = "batch"
    per_reward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GroupStd(self.ddof, self.std_eps)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        each = Relative(GroupMean(), GroupStd(self.ddof, self.std_eps))
        columns = torch.stack([each(column, batch=batch) for column in rewards.unbind(1)], dim=1)
        if batch.reward_weights is not None:
            extra = rewards.shape[1] - len(batch.reward_weights)  # shaping terms count as rewards of weight 1
            weights = torch.cat([batch.reward_weights.to(columns), columns.new_ones(extra)])
            columns = columns * weights
        known = ~rewards.isnan().all(dim=1)
        total = columns.sum(dim=1)
        return standardize(total, where=known, ddof=self.ddof, std_eps=self.std_eps)

    def equation(self) -> str:
        eps = f" + {self.std_eps:g}" if self.std_eps else ""
        return (
            f"A_i = z(sum_k weight_k (R_ik - mean(R_k)) / (std(R_k){eps}))      std with ddof = {self.ddof} in the "
            "group, z over the batch"
        )
