"""Computes advantages from the turns of multi-turn episodes: credit for each turn instead of one for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope, not_negative, one_of
from .scale import GroupStd
from .segments import group_centred, group_z_score, subgroups
from .turns import Turns, discounted_returns

NORMS = ("mean-std", "mean")
"""What is done to rewards within a group: centred and divided by the deviation, or centred alone."""


def mt_grpo_advantages(
    rewards: Float[Tensor, "M"],
    *,
    numbers: Int[Tensor, "M"],
    is_last: Bool[Tensor, "M"],
    group_ids: Int[Tensor, "M"],
    outcome_weight: float = 1.0,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Float[Tensor, "M"]:
    """The advantage of each turn from its own reward and from the outcome: MT-GRPO, arXiv 2505.11821.

        A_k = z(r_k) + outcome_weight z(R)   for every turn k but the last,   A_last = z(R)

    R is the reward of an episode's last turn; z(R) is its z-score among the episodes of the group, z(r_k) that of the
    turn's reward among the k-th turns of the group that are not last. ``numbers`` counts turns from 0. Equal rewards,
    and a reward that has no other to be compared with, have a z-score of exactly 0; NaN rewards take no part.

    >>> a = mt_grpo_advantages(torch.tensor([.2, 1., .4, 0.]), numbers=torch.tensor([0, 1, 0, 1]),
    ...     is_last=torch.tensor([False, True, False, True]), group_ids=torch.zeros(4, dtype=torch.int64),
    ...     outcome_weight=3.0, ddof=0)
    >>> [round(x, 4) for x in a.tolist()]
    [2.0, 1.0, -2.0, -1.0]
    """
    # Last turns are compared with last turns; the others, below, with those of the same number. NaN takes no part.
    outcome = group_z_score(torch.where(is_last, rewards, torch.nan), group_ids=group_ids, ddof=ddof, std_eps=std_eps)
    own = group_z_score(
        torch.where(is_last, torch.nan, rewards), group_ids=subgroups(numbers, group_ids=group_ids),
        ddof=ddof, std_eps=std_eps,
    )  # fmt: skip
    # Turns are in order, so that the number of last turns before a turn is the place of its episode among them.
    episode = is_last.cumsum(0) - is_last.to(torch.int64)
    outcomes = outcome[is_last][episode]
    return torch.where(is_last, outcomes, own + outcome_weight * outcomes)


class _TurnCredit(Advantage):
    """An advantage for each turn, taken over by all of its tokens."""

    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", "turns")

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.turns is not None
        turns = batch.turns
        values = self.of_turns(_turn_rewards(rewards, batch=batch, turns=turns), rewards, batch=batch, turns=turns)
        # (M,) turns -> (N,) tokens
        return values[turns.of_tokens(batch.sequence_ids)]

    def of_turns(self, turn_rewards: Tensor, rewards: Tensor, *, batch: TokenBatch, turns: Turns) -> Tensor:
        """Advantages (M,) from the rewards of turns (M,) and of sequences (S,), NaN for those that take no part."""
        raise NotImplementedError


def _turn_rewards(rewards: Float[Tensor, "S"], *, batch: TokenBatch, turns: Turns) -> Float[Tensor, "M"]:
    """The rewards of turns: with what shaping added to the sequence's reward in its last turn; NaN if that is NaN.

    A penalty for length, for instance, is known only when the episode is over.
    """
    added = (rewards - batch.total_rewards)[turns.sequence_ids]
    return turns.rewards.to(rewards.dtype) + torch.where(turns.is_last | added.isnan(), added, 0.0)


@dataclass(frozen=True)
class EpisodeAndState(_TurnCredit):
    """A_k = norm(R_i) + omega norm(G_k), where norm is within the group of episodes, and within the group of turns
    that began in the same state: GiGPO, arXiv 2505.10978.

    A turn whose state no other turn of the group began in has the first term alone.
    """

    omega: float = 1.0
    turn_discount: float = 0.95
    norm: str = "mean-std"
    ddof: int = 1
    std_eps: float = 0.0

    def __post_init__(self) -> None:
        not_negative(omega=self.omega)
        _check_discount(self.turn_discount)
        one_of(NORMS, norm=self.norm)
        # Made only to check the numbers.
        GroupStd(self.ddof, self.std_eps)
        if self.norm == "mean":
            for name, value, default in (("ddof", self.ddof, 1), ("std_eps", self.std_eps, 0.0)):
                if value != default:
                    raise ValueError(f"{name}: got {value!r}, but norm = 'mean' divides by no deviation; leave it out")

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "states")

    def of_turns(self, turn_rewards: Tensor, rewards: Tensor, *, batch: TokenBatch, turns: Turns) -> Tensor:
        assert turns.states is not None
        returns = discounted_returns(turn_rewards, sequence_ids=turns.sequence_ids, discount=self.turn_discount)
        # Anchor states, eq. 6: those of other groups are never compared, since their prompts differ.
        alike = subgroups(turns.states, group_ids=batch.group_ids[turns.sequence_ids])
        # (S,) by episode, while returns are (M,) by turn.
        episodes = self._normalised(rewards, group_ids=batch.group_ids)
        return episodes[turns.sequence_ids] + self.omega * self._normalised(returns, group_ids=alike)

    def _normalised(self, values: Tensor, *, group_ids: Tensor) -> Tensor:
        if self.norm == "mean":
            return group_centred(values, group_ids=group_ids)
        return group_z_score(values, group_ids=group_ids, ddof=self.ddof, std_eps=self.std_eps)

    def equation(self) -> str:
        kind = f"z-score, ddof = {self.ddof}{_shown(self.std_eps)}" if self.norm == "mean-std" else "minus the mean"
        return (
            f"A_k = z(R_i) + {_times(self.omega)}z(G_k)      {_return(self.turn_discount)}; z: {kind}; R in the "
            "group, G among the group's turns that began in the same state"
        )


@dataclass(frozen=True)
class TurnAndOutcome(_TurnCredit):
    """:func:`mt_grpo_advantages` as a component."""

    outcome_weight: float = 1.0
    ddof: int = 1
    std_eps: float = 0.0

    def __post_init__(self) -> None:
        not_negative(outcome_weight=self.outcome_weight)
        GroupStd(self.ddof, self.std_eps)

    def of_turns(self, turn_rewards: Tensor, rewards: Tensor, *, batch: TokenBatch, turns: Turns) -> Tensor:
        return mt_grpo_advantages(
            turn_rewards, numbers=turns.numbers, is_last=turns.is_last, group_ids=batch.group_ids[turns.sequence_ids],
            outcome_weight=self.outcome_weight, ddof=self.ddof, std_eps=self.std_eps,
        )  # fmt: skip

    def equation(self) -> str:
        return (
            f"A_k = z(r_k) + {_times(self.outcome_weight)}z(R_i), of the last turn z(R_i)      R_i: reward of the last "
            f"turn; z: z-score, ddof = {self.ddof}{_shown(self.std_eps)}; R in the group, r_k among its k-th turns"
        )


@dataclass(frozen=True)
class TurnReturns(_TurnCredit):
    """A_k = z(G_k): the z-score of a turn's discounted return among the k-th turns of the group. MT-GRPO's second
    estimator, arXiv 2505.11821.

    A turn that no other episode of the group reached has advantage exactly 0.
    """

    turn_discount: float = 1.0
    ddof: int = 1
    std_eps: float = 0.0

    def __post_init__(self) -> None:
        _check_discount(self.turn_discount)
        GroupStd(self.ddof, self.std_eps)

    def of_turns(self, turn_rewards: Tensor, rewards: Tensor, *, batch: TokenBatch, turns: Turns) -> Tensor:
        returns = discounted_returns(turn_rewards, sequence_ids=turns.sequence_ids, discount=self.turn_discount)
        alike = subgroups(turns.numbers, group_ids=batch.group_ids[turns.sequence_ids])
        return group_z_score(returns, group_ids=alike, ddof=self.ddof, std_eps=self.std_eps)

    def equation(self) -> str:
        return (
            f"A_k = z(G_k)      {_return(self.turn_discount)}; z: z-score among the group's k-th turns, "
            f"ddof = {self.ddof}{_shown(self.std_eps)}"
        )


def _check_discount(turn_discount: float) -> None:
    if not 0 <= turn_discount <= 1:
        raise ValueError(f"turn_discount: got {turn_discount!r}, accepts a number from 0 to 1; 1 discounts nothing")


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} "


def _return(discount: float) -> str:
    return f"G_k = sum_(l >= k) {'' if discount == 1 else f'{discount:g}^(l - k) '}r_l"


def _shown(std_eps: float) -> str:
    return f", std + {std_eps:g}" if std_eps else ""
