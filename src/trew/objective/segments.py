"""Sums and statistics over sequences and groups. Where values are rewards, NaN means missing and is left out."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def segment_sum(values: Float[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Float[Tensor, "size"]:
    """Sum of ``values`` by ``ids`` in [0, size).

    >>> segment_sum(torch.tensor([1., 2., 3.]), ids=torch.tensor([0, 1, 1]), size=3).tolist()
    [1.0, 5.0, 0.0]
    """
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, ids, values)


def segment_count(mask: Bool[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Int[Tensor, "size"]:
    """The number of True entries of ``mask`` by id."""
    zero = torch.zeros(size, dtype=torch.int64, device=mask.device)
    return zero.index_add_(0, ids, mask.to(torch.int64))


def segment_mean(
    values: Float[Tensor, "N"], *, mask: Bool[Tensor, "N"], ids: Int[Tensor, "N"], size: int
) -> Float[Tensor, "size"]:
    """Mean of ``values`` where ``mask`` by id, computed in float64; 0 if an id has none.

    >>> m = torch.tensor([True, True, False])
    >>> segment_mean(torch.tensor([1., 2., 9.]), mask=m, ids=torch.tensor([0, 0, 1]), size=2).tolist()
    [1.5, 0.0]
    """
    total = segment_sum(torch.where(mask, values, 0.0).to(torch.float64), ids=ids, size=size)
    return (total / segment_count(mask, ids=ids, size=size).clamp(min=1)).to(values.dtype)


def segment_starts(ids: Int[Tensor, "N"], *, size: int) -> Int[Tensor, "size"]:
    """The position at which each id's run begins in a stream sorted by id; for an id without tokens, of the next id.

    >>> segment_starts(torch.tensor([0, 0, 2]), size=3).tolist()
    [0, 2, 2]
    """
    return torch.searchsorted(ids.contiguous(), torch.arange(size, device=ids.device))


def positions(mask: Bool[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Int[Tensor, "N"]:
    """The number of tokens of ``mask`` before each token in its own run.

    >>> positions(torch.tensor([True, False, True, True]), ids=torch.tensor([0, 0, 0, 1]), size=2).tolist()
    [0, 1, 1, 0]
    """
    if not len(ids):
        return ids
    # Counted over the whole stream, less the count at the beginning of the own run. The clamp is for ids without tokens
    # at the end: they begin behind the stream, and no token reads their entry.
    before = mask.to(torch.int64).cumsum(0) - mask.to(torch.int64)
    return before - before[segment_starts(ids, size=size).clamp(max=len(ids) - 1)][ids]


def last_of(mask: Bool[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Bool[Tensor, "N"]:
    """True for the last token of ``mask`` in each run.

    >>> last_of(torch.tensor([True, True, False, True]), ids=torch.tensor([0, 0, 0, 1]), size=2).tolist()
    [False, True, False, True]
    """
    count = segment_count(mask, ids=ids, size=size)[ids]
    return mask & (positions(mask, ids=ids, size=size) == count - 1)


def to_go(values: Float[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Float[Tensor, "N"]:
    """The sum of each token's value and of all later ones in its own run, in float64.

    >>> to_go(torch.tensor([1., 2., 4.]), ids=torch.tensor([0, 0, 1]), size=2).tolist()
    [3.0, 2.0, 4.0]
    """
    wide = values.to(torch.float64)  # the sum of a run is a difference of sums over the whole stream
    total = segment_sum(wide, ids=ids, size=size)
    before = wide.cumsum(0) - wide
    start = segment_starts(ids, size=size).clamp(max=max(len(ids) - 1, 0))
    return total[ids] - (before - before[start][ids]) if len(ids) else wide


def so_far(values: Float[Tensor, "N"], *, ids: Int[Tensor, "N"], size: int) -> Float[Tensor, "N"]:
    """The sum of each token's value and of all earlier ones in its own run, in float64.

    >>> so_far(torch.tensor([1., 2., 4.]), ids=torch.tensor([0, 0, 1]), size=2).tolist()
    [1.0, 3.0, 4.0]
    """
    wide = values.to(torch.float64)
    total = segment_sum(wide, ids=ids, size=size)
    # Both sums contain the token itself, so that it is subtracted with the later ones and added again.
    return total[ids] - to_go(values, ids=ids, size=size) + wide


def dense_ids(ids: Int[Tensor, "S"]) -> tuple[Int[Tensor, "S"], int]:
    """Renumbers ids to 0 .. K-1; returns the new ids and K.

    >>> dense_ids(torch.tensor([7, 7, 3]))
    (tensor([1, 1, 0]), 2)
    """
    unique, dense = torch.unique(ids, return_inverse=True)
    return dense, len(unique)


def subgroups(kinds: Int[Tensor, "M"], *, group_ids: Int[Tensor, "M"]) -> Int[Tensor, "M"]:
    """Numbers the pairs (group, kind): one id for the members of a group that are of one kind.

    >>> subgroups(torch.tensor([7, 7, 8, 7]), group_ids=torch.tensor([0, 0, 0, 1])).tolist()
    [0, 0, 1, 2]
    """
    dense, size = dense_ids(kinds)
    # group * K + kind, unique since kinds are 0 .. K - 1.
    return dense_ids(dense_ids(group_ids)[0] * size + dense)[0]


def group_mean(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """The mean reward of each sequence's group, over rewards that are not NaN; NaN if a group has none.

    >>> group_mean(torch.tensor([1., 0., float("nan")]), group_ids=torch.tensor([5, 5, 5])).tolist()
    [0.5, 0.5, 0.5]
    """
    ids, size = dense_ids(group_ids)
    total = segment_sum(rewards.nan_to_num(0.0), ids=ids, size=size)
    # 0 / 0 = NaN where no reward of the group is known.
    return (total / segment_count(~rewards.isnan(), ids=ids, size=size))[ids]


def group_std(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], ddof: int = 1) -> Float[Tensor, "S"]:
    """The standard deviation of each sequence's group with the divisor n - ``ddof``, over rewards that are not NaN.

    NaN for a group of no more than ``ddof`` known rewards, which has no such deviation.

    >>> group_std(torch.tensor([1., 0., 0., 0.]), group_ids=torch.zeros(4, dtype=torch.int64)).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    # Two passes, with deviations from the mean: mean(x^2) - mean(x)^2 would cancel for rewards far from 0.
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    squares = ((rewards - group_mean(rewards, group_ids=group_ids)) ** 2).nan_to_num(0.0)
    freedom = (segment_count(known, ids=ids, size=size) - ddof).to(rewards.dtype)
    variance = segment_sum(squares, ids=ids, size=size) / torch.where(freedom > 0, freedom, torch.nan)
    return variance.sqrt()[ids]


def has_signal(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Bool[Tensor, "S"]:
    """Whether the rewards of each sequence's group differ: max - min above rounding error.

    Judged by the spread and not by the standard deviation: rounding can leave the latter above 0 for equal rewards, and
    dividing by it would create a signal.

    >>> has_signal(torch.tensor([.7, .7, 1., 0.]), group_ids=torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    low = torch.full((size,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    low = low.scatter_reduce(0, ids, torch.where(known, rewards, torch.inf), "amin")
    high = torch.full((size,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = high.scatter_reduce(0, ids, torch.where(known, rewards, -torch.inf), "amax")
    # Relative to the largest magnitude, which counts as at least 1e-6. A group without rewards has -inf - inf < it.
    tolerance = 1e-6 * torch.maximum(-low, high).clamp(min=1e-6)
    return (high - low > tolerance)[ids]


def group_centred(values: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """x - mean within the group; exactly 0 for NaN, and where all values of the group are equal.

    >>> group_centred(torch.tensor([1., 3., .7]), group_ids=torch.tensor([0, 0, 1])).tolist()
    [-1.0, 1.0, 0.0]
    """
    centred = values - group_mean(values, group_ids=group_ids)
    return torch.where(has_signal(values, group_ids=group_ids), centred, 0.0).nan_to_num(0.0)


def group_z_score(
    values: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], ddof: int = 1, std_eps: float = 0.0
) -> Float[Tensor, "S"]:
    """(x - mean) / (std + std_eps) within the group; exactly 0 for NaN, and where all values of the group are equal.

    >>> group_z_score(torch.tensor([1., 3., .7]), group_ids=torch.tensor([0, 0, 1]), ddof=0).tolist()
    [-1.0, 1.0, 0.0]
    """
    deviation = group_std(values, group_ids=group_ids, ddof=ddof) + std_eps
    # Without signal the quotient is discarded: rounding divided by rounding can be of any size.
    scaled = (values - group_mean(values, group_ids=group_ids)) / deviation
    return torch.where(has_signal(values, group_ids=group_ids), scaled, 0.0).nan_to_num(0.0)


def standardize(
    values: Float[Tensor, "M"], *, where: Bool[Tensor, "M"], ddof: int = 1, std_eps: float = 0.0
) -> Float[Tensor, "M"]:
    """(x - mean) / (std + std_eps) over all values at ``where``; exactly 0 elsewhere and where all are equal.

    >>> standardize(torch.tensor([1., 3., 9.]), where=torch.tensor([True, True, False]), ddof=0).tolist()
    [-1.0, 1.0, 0.0]
    """
    # All values as one group; NaN takes no part.
    one = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return group_z_score(torch.where(where, values, torch.nan), group_ids=one, ddof=ddof, std_eps=std_eps)
