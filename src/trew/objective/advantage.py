"""Computes advantages from rewards.

    A_i = (R_i - baseline_i) / scale_i

Baselines and scales are separate components, since RLOO, Lite-PPO, MaxRL and others differ in nothing else. Rewards
are float64 here; NaN marks a sequence that takes no part, and its advantage is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import DataError
from .baseline import Baseline, GroupMean
from .batch import TokenBatch
from .component import Component, Scope
from .renamed import refuse
from .scale import GroupStd, NoScaling, Scale
from .segments import dense_ids, has_signal, segment_count, standardize


def pass_at_k(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], k: int) -> Float[Tensor, "S"]:
    """Advantages of 0/1 ``rewards`` whose expected gradient raises the chance that at least one of k answers is right.

        Rbar = 1 - C(N-, k) / C(N, k),   s = sqrt(Rbar (1 - Rbar)),
        A+ = (1 - Rbar) / s,   A- = (1 - Rbar - C(N- - 1, k - 1) / C(N - 1, k - 1)) / s

    Pass@k Training, arXiv 2508.10751. k = 1 is GRPO with the population deviation. 0 where s = 0, and in groups of
    fewer than k.

    >>> r = torch.tensor([1., 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    >>> [round(a, 6) for a in pass_at_k(r, group_ids=torch.zeros(8, dtype=torch.int64), k=4)[:2].tolist()]
    [1.0, -0.142857]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    n = segment_count(known, ids=ids, size=size).to(torch.float64)
    wrong = segment_count(known & (rewards <= 0), ids=ids, size=size).to(torch.float64)

    def all_wrong(wrong: Tensor, n: Tensor, k: int) -> Tensor:
        """C(wrong, k) / C(n, k): the chance that k answers, drawn without replacement, are wrong."""
        # A product of k factors: binomial coefficients of large groups overflow. Where wrong < k, one factor is 0.
        chance = torch.ones_like(n)
        for j in range(k):
            chance = chance * ((wrong - j) / (n - j))
        return chance

    miss = all_wrong(wrong, n, k)  # 1 - Rbar
    s = (miss * (1 - miss)).sqrt()
    right = miss / s
    # Meaningless in a group without a wrong answer (wrong - 1 = -1), where nobody reads it.
    bad = (miss - all_wrong(wrong - 1, n - 1, k - 1)) / s
    advantage = torch.where(rewards > 0, right[ids], bad[ids])
    # s = 0 divides by 0 above, n < k by n - j = 0: torch.where drops what comes of it.
    return torch.where(known & (s > 0)[ids] & (n >= k)[ids], advantage, 0.0)


@runtime_checkable
class Advantage(Component, Protocol):
    """Advantages, (S,) or (N,), from rewards (S,): 0 for sequences whose reward is NaN."""

    scope: ClassVar[Scope] = "group"
    reads_rewards: ClassVar[bool] = True  # False: terms added to the reward have no effect, so they are refused
    per_token: ClassVar[bool] = False  # True: returns (N,)
    per_reward: ClassVar[bool] = False  # True: receives the rewards (S, K) one by one, unweighted
    judged: ClassVar[bool] = True  # False: a sequence takes part without a reward, too
    per_token_rewards: ClassVar[bool] = False  # True: receives the rewards of tokens (N,), a KL in the reward in each

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor: ...

    def returns(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor | None:
        """(N,) what a critic learns, from the same rewards; None where no critic takes part."""
        return None


@dataclass(frozen=True)
class BaselineAdvantage(Advantage):
    """A_i = (R_i - baseline_i) / scale_i.

    With a baseline computed from the group, groups whose rewards are all equal (and groups of one) have advantage
    exactly 0, whatever rounding leaves.
    """

    baseline: Baseline = field(default_factory=GroupMean)
    scale: Scale = field(default_factory=NoScaling)
    scope: ClassVar[Scope] = "batch"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", *self.baseline.needs, *self.scale.needs)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        centred = rewards - self.baseline(rewards, batch=batch)
        # 0.7 - mean(0.7, 0.7, 0.7) can be 1e-16, and so can the deviation: their quotient would be a signal.
        if self.baseline.scope in ("group", "batch"):
            ids = batch.group_ids if self.baseline.scope == "group" else torch.zeros_like(batch.group_ids)
            centred = torch.where(has_signal(rewards, group_ids=ids), centred, 0.0)
        # NaN: the sequence takes no part, or the scale does not exist; inf: the scale is 0. No signal in any of them.
        return (centred / self.scale(rewards, batch=batch)).nan_to_num(0.0, 0.0, 0.0)

    def equation(self) -> str:
        scale = self.scale.equation()
        difference = self.baseline.equation()
        return f"A_i = ({difference}){scale}" if scale and " " in difference else f"A_i = {difference}{scale}"


def z_score(ddof: int = 1, std_eps: float = 0.0) -> BaselineAdvantage:
    """GRPO's advantage: A_i = (R_i - mean R) / (std R + std_eps) within the group."""
    return BaselineAdvantage(GroupMean(), GroupStd(ddof, std_eps))


@dataclass(frozen=True)
class PassAtK(Advantage):
    """:func:`pass_at_k` as a component, of which answers are correct."""

    k: int = 4
    reads_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k!r}, accepts a whole number of at least 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        judged = torch.where(rewards.isnan(), rewards, batch.is_correct.to(rewards.dtype))
        return pass_at_k(judged, group_ids=batch.group_ids, k=self.k)

    def equation(self) -> str:
        return (
            f"A+ = (1 - p) / s, A- = (1 - p - q) / s      p: one of {self.k} is right, s = sqrt(p (1 - p)), "
            f"q: the {self.k - 1} drawn with a wrong one are wrong"
        )


@dataclass(frozen=True)
class ExternalAdvantages(Advantage):
    """Takes ``TokenBatch.advantages`` as they are, a critic's for instance; nothing is computed from rewards."""

    scope: ClassVar[Scope] = "token"
    reads_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("advantages",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        raise DataError("advantages: got None; this objective takes them from outside, from a critic: pass advantages")

    def equation(self) -> str:
        return "A_t given"


@dataclass(frozen=True)
class NoAdvantage(Advantage):
    """A_i = 0, with or without rewards: all that is learned comes from what is added to it."""

    scope: ClassVar[Scope] = "token"
    reads_rewards: ClassVar[bool] = False
    judged: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return torch.zeros_like(rewards)

    def equation(self) -> str:
        return "A_i = 0"


@dataclass(frozen=True)
class PerReward(Advantage):
    """A_i = z( sum_k weight_k (R_ik - mean_k) / (std_k + std_eps) ): GDPO, arXiv 2601.05242.

    Each reward is normalised within its group, over the completions to which it applies; z is the z-score over all
    sequences of the step. A group in which no reward differs has advantage exactly 0.
    """

    ddof: int = 1
    std_eps: float = 0.0
    scope: ClassVar[Scope] = "batch"
    per_reward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GroupStd(self.ddof, self.std_eps)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        each = z_score(self.ddof, self.std_eps)
        # 0 for a reward that does not apply (NaN), so that it adds nothing to the sum.
        columns = torch.stack([each(column, batch=batch) for column in rewards.unbind(1)], dim=1)
        if batch.reward_weights is not None:
            # The objective appends its shaping terms (a length penalty) as columns: rewards of weight 1.
            extra = rewards.shape[1] - len(batch.reward_weights)
            weights = torch.cat([batch.reward_weights.to(columns), columns.new_ones(extra)])
            columns = columns * weights
        known = ~rewards.isnan().all(dim=1)
        total = columns.sum(dim=1)
        scaled = standardize(total, where=known, ddof=self.ddof, std_eps=self.std_eps)
        # Every column sums to 0 within every group, and so does the batch: what the mean is instead is rounding.
        return torch.where(total == 0, 0.0, scaled)

    def equation(self) -> str:
        eps = f" + {self.std_eps:g}" if self.std_eps else ""
        return (
            f"A_i = z(sum_k weight_k (R_ik - mean(R_k)) / (std(R_k){eps}))      std with ddof = {self.ddof} in the "
            "group, z over the batch"
        )


if not TYPE_CHECKING:
    __getattr__ = refuse(__name__, {"Relative": "BaselineAdvantage", "Given": "ExternalAdvantages"})
