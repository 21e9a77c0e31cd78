"""What carries loss: a ``GroupFilter`` chooses sequences before advantages are computed, a ``LossMask`` after, a
``TokenMask`` chooses tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DataError
from .batch import TokenBatch
from .component import Component, Scope, share_of
from .renamed import refuse
from .segments import dense_ids, has_signal, segment_count, segment_starts


def mixed_groups(batch: TokenBatch) -> Bool[Tensor, "S"]:
    """True for sequences of groups with both right and wrong completions: 0 < correct < G.

    Judged by ``correct`` and not by the shaped reward, since a length penalty would make the rewards of an all-correct
    group differ. Without ``correct``, judged by whether the rewards differ.
    """
    if batch.correct is None:
        return uneven_groups(batch)
    ids, size = dense_ids(batch.group_ids)
    # A completion without a verdict is neither right nor wrong.
    known = torch.ones_like(batch.correct) if batch.rewards is None else ~batch.total_rewards.isnan()
    right = segment_count(batch.correct & known, ids=ids, size=size)
    count = segment_count(known, ids=ids, size=size)
    return ((right > 0) & (right < count))[ids]


def uneven_groups(batch: TokenBatch) -> Bool[Tensor, "S"]:
    """True for sequences of groups whose rewards differ or, without rewards, whose advantages are not all 0. Raises
    DataError without both."""
    if batch.rewards is not None:
        return has_signal(batch.total_rewards, group_ids=batch.group_ids)
    if batch.advantages is None:  # with rewards of steps alone, or a teacher's log-probs
        raise DataError(
            "rewards: got None; which groups have a signal is judged by them, or by correct: give one of them"
        )
    ids, size = dense_ids(batch.group_ids)
    moved = (batch.advantages != 0) & batch.mask
    return (segment_count(moved, ids=ids[batch.sequence_ids], size=size) > 0)[ids]


def largest_in_group(values: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], keep: float) -> Bool[Tensor, "S"]:
    """True for the ceil(keep G) largest ``values`` of each group; of values that are equal up to rounding, the first
    ones. NaN values do not belong to the group.

    >>> v, ids = torch.tensor([.1, .9, .5, .5]), torch.tensor([0, 0, 0, 0])
    >>> largest_in_group(v, group_ids=ids, keep=0.5).tolist()
    [False, True, True, False]
    """
    ids, size = dense_ids(group_ids)
    known = ~values.isnan()
    if not len(values):
        return known
    # A group of two has advantages +A and -A. Their magnitudes are equal, and rounding must not choose between them.
    unit = torch.where(known, values.abs(), 0.0).max().clamp(min=1e-20) * 1e-9
    order = torch.argsort(torch.where(known, (values / unit).round(), -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(ids[order], stable=True)]  # by group, and within one by value
    rank = torch.empty_like(ids)
    rank[order] = torch.arange(len(ids), device=ids.device) - segment_starts(ids[order], size=size)[ids[order]]
    count = segment_count(known, ids=ids, size=size)
    # In floating point 1 - 0.7 is a little more than 0.3, and its ceil for 10 sequences must still be 3.
    return known & (rank < torch.ceil(keep * count.to(torch.float64) - 1e-9)[ids])


def high_entropy(entropies: Float[Tensor, "N"], *, mask: Bool[Tensor, "N"], share: float = 0.2) -> Bool[Tensor, "N"]:
    """True for the tokens whose entropy reaches the (1 - share)-quantile of all of ``mask``, linearly interpolated:
    the forking tokens of arXiv 2506.01939.

    >>> h, m = torch.tensor([0., 1., 2., 3., 4., 9.]), torch.tensor([True] * 5 + [False])
    >>> high_entropy(h, mask=m, share=0.25).tolist()
    [False, False, False, True, True, False]
    """
    chosen = entropies[mask].sort().values
    if not len(chosen):
        return mask
    # torch.quantile refuses more than 2^24 values.
    rank = (1 - share) * (len(chosen) - 1)
    low = int(rank)
    high = min(low + 1, len(chosen) - 1)
    threshold = torch.lerp(chosen[low], chosen[high], rank - low)
    return mask & (entropies >= threshold)


@runtime_checkable
class GroupFilter(Component, Protocol):
    """True (S,) for the sequences that stay; the others leave the group's statistics, the mask and the denominators."""

    scope: ClassVar[Scope] = "group"

    def __call__(self, batch: TokenBatch) -> Tensor: ...


@runtime_checkable
class LossMask(Component, Protocol):
    """True (S,) for the sequences that carry loss. The others have been counted in the advantages; they leave the mask
    and the denominators.

    ``advantages`` (S,) holds the largest magnitude among each sequence's tokens, NaN for sequences that take no part.
    """

    scope: ClassVar[Scope] = "group"

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor: ...


@runtime_checkable
class TokenMask(Component, Protocol):
    """True (N,) for the tokens that keep their advantage. The others get advantage 0, given or computed; they stay in
    the denominators, and under a divergence that is in the loss (kl_place)."""

    def __call__(self, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class MixedGroups(GroupFilter):
    """:func:`mixed_groups` as a component; in training, groups that it drops are replaced by freshly sampled ones."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return mixed_groups(batch)

    def equation(self) -> str:
        return "keep groups with 0 < #correct < G (dynamic sampling: others are replaced by fresh ones)"


@dataclass(frozen=True)
class UnevenGroups(GroupFilter):
    """:func:`uneven_groups` as a component; the step is smaller by what it drops."""

    def __call__(self, batch: TokenBatch) -> Tensor:
        return uneven_groups(batch)

    def equation(self) -> str:
        return "keep groups whose rewards differ (the others leave the denominators)"


@dataclass(frozen=True)
class UncutCompletions(LossMask):
    """Completions that were cut off at the length limit carry no loss: DAPO's overlong filtering."""

    scope: ClassVar[Scope] = "sequence"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("truncated",)

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.truncated is not None
        return ~batch.truncated

    def equation(self) -> str:
        return "only completions that ended by themselves carry loss (overlong filtering)"


@dataclass(frozen=True)
class LargestAdvantages(LossMask):
    """Only the G (1 - pruning) completions of a group with the largest |A| carry loss: CPPO, arXiv 2503.22342."""

    pruning: float = 0.5

    def __post_init__(self) -> None:
        share_of(pruning=self.pruning)
        if self.pruning == 1:
            raise ValueError(f"pruning: got {self.pruning!r}, accepts 0 or more and less than 1")

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor:
        return largest_in_group(advantages, group_ids=batch.group_ids, keep=1 - self.pruning)

    def equation(self) -> str:
        return f"only the {1 - self.pruning:.4g} G completions of a group with the largest |A| carry loss"


@dataclass(frozen=True)
class HighEntropyTokens(TokenMask):
    """:func:`high_entropy` as a component; ``TokenBatch.entropies`` are the rollout policy's."""

    share: float = 0.2
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        share_of(share=self.share)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("entropies",)

    def __call__(self, batch: TokenBatch) -> Tensor:
        assert batch.entropies is not None
        return high_entropy(batch.entropies.detach(), mask=batch.mask, share=self.share)

    def equation(self) -> str:
        return f"A_t <- 0 but for the {self.share:.4g} of the step's tokens with the highest entropy"


if not TYPE_CHECKING:
    _RENAMED = {"Keep": "GroupFilter", "Prune": "LossMask", "Select": "TokenMask", "Finished": "UncutCompletions"}
    __getattr__ = refuse(__name__, _RENAMED)
