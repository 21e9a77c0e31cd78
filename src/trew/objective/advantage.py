"""Reward -> advantage: a baseline taken off, and a scale divided out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .segments import group_mean, group_std, has_signal

Coupling = Literal["token", "sequence", "group", "batch"]
"""The least set of tokens that must be seen together for a piece to be exact."""


def group_centred(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """A_i = R_i - mean(R) within the group: Dr. GRPO, arXiv 2503.20783, eq. 2 without its std.

    Exactly 0 for groups whose rewards are equal, of size one, and for NaN rewards.

    >>> group_centred(torch.tensor([1., 0., 0., 0.]), group_ids=torch.zeros(4, dtype=torch.int64)).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    centred = rewards - group_mean(rewards, group_ids=group_ids)
    return torch.where(has_signal(rewards, group_ids=group_ids), centred, 0.0).nan_to_num(0.0)


def group_normalized(
    rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], ddof: int = 1, std_eps: float = 0.0
) -> Float[Tensor, "S"]:
    """A_i = (R_i - mean(R)) / (std(R) + std_eps) within the group: GRPO, DeepSeekMath arXiv 2402.03300 §4.1.2.

    ``ddof=1`` is the sample deviation, which the public implementations use; the paper does not say. Exactly 0 for
    groups whose rewards are equal, of size one, and for NaN rewards.

    >>> a = group_normalized(torch.tensor([1., 0., 0., 0.]), group_ids=torch.zeros(4, dtype=torch.int64))
    >>> a.tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    centred = group_centred(rewards, group_ids=group_ids)
    return (centred / (group_std(rewards, group_ids=group_ids, ddof=ddof) + std_eps)).nan_to_num(0.0, 0.0, 0.0)


@runtime_checkable
class Advantage(Protocol):
    """One advantage per sequence from one reward per sequence."""

    couples: ClassVar[Coupling]

    def __call__(self, rewards: Tensor, *, group_ids: Tensor) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupCentred:
    """:func:`group_centred` as a value."""

    couples: ClassVar[Coupling] = "group"

    def __call__(self, rewards: Tensor, *, group_ids: Tensor) -> Tensor:
        return group_centred(rewards, group_ids=group_ids)

    def equation(self) -> str:
        return "A_i = R_i - mean(R)"


@dataclass(frozen=True, slots=True)
class GroupNormalized:
    """:func:`group_normalized` as a value."""

    ddof: int = 1
    std_eps: float = 0.0
    couples: ClassVar[Coupling] = "group"

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof: got {self.ddof!r}, accepts 0 (population) or 1 (sample)")
        if not self.std_eps >= 0:
            raise ValueError(f"std_eps: got {self.std_eps!r}, accepts 0 or more")

    def __call__(self, rewards: Tensor, *, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids=group_ids, ddof=self.ddof, std_eps=self.std_eps)

    def equation(self) -> str:
        eps = f" + {self.std_eps:g}" if self.std_eps else ""
        return f"A_i = (R_i - mean(R)) / (std(R){eps})      std with ddof = {self.ddof}; 0 where all R are equal"
