"""Which sequences carry loss at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import DataError
from .advantage import Coupling
from .batch import TokenBatch
from .segments import dense_ids, has_signal, segment_count


def mixed_groups(batch: TokenBatch) -> Bool[Tensor, "S"]:
    """True for sequences of groups that hold both right and wrong completions: 0 < correct < G.

    Judged by ``correct`` and not by the shaped reward: a length penalty would give an all-correct group a spread.
    Without ``correct``, by whether the rewards differ.
    """
    if batch.correct is None:
        assert batch.rewards is not None
        return has_signal(total_reward(batch.rewards), group_ids=batch.group_ids)
    ids, size = dense_ids(batch.group_ids)
    known = torch.ones_like(batch.correct) if batch.rewards is None else ~total_reward(batch.rewards).isnan()
    right = segment_count(batch.correct & known, ids=ids, size=size)
    count = segment_count(known, ids=ids, size=size)
    return ((right > 0) & (right < count))[ids]


def total_reward(rewards: Tensor) -> Tensor:
    """(S,) from (S,) or (S, K): the sum of the rewards that apply, NaN where none does."""
    if rewards.dim() == 1:
        return rewards
    return torch.where(rewards.isnan().all(dim=1), torch.nan, rewards.nansum(dim=1))


@runtime_checkable
class Keep(Protocol):
    """True for the sequences that stay."""

    couples: ClassVar[Coupling]

    def __call__(self, batch: TokenBatch) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MixedGroups:
    """:func:`mixed_groups` as a value; in training, groups that it drops are replaced by freshly sampled ones."""

    couples: ClassVar[Coupling] = "group"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return mixed_groups(batch)

    def equation(self) -> str:
        return "keep groups with 0 < #correct < G (dynamic sampling: others are replaced by fresh ones)"


@dataclass(frozen=True, slots=True)
class Finished:
    """Drops completions that were cut off at the length limit: DAPO's overlong filtering."""

    couples: ClassVar[Coupling] = "sequence"

    def __call__(self, batch: TokenBatch) -> Tensor:
        if batch.truncated is None:
            raise DataError("truncated: got None; overlong filtering needs to know which completions were cut off")
        return ~batch.truncated

    def equation(self) -> str:
        return "keep completions that ended by themselves (overlong filtering)"
