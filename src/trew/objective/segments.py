"""Sums and statistics over sequences and groups, NaN-aware where rewards may be missing."""

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
    """How many of ``mask`` are True per id."""
    zero = torch.zeros(size, dtype=torch.int64, device=mask.device)
    return zero.index_add_(0, ids, mask.to(torch.int64))


def dense_ids(ids: Int[Tensor, "S"]) -> tuple[Int[Tensor, "S"], int]:
    """Renumbers arbitrary ids to 0 .. K-1; returns them and K.

    >>> dense_ids(torch.tensor([7, 7, 3]))
    (tensor([1, 1, 0]), 2)
    """
    unique, dense = torch.unique(ids, return_inverse=True)
    return dense, len(unique)


def group_mean(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Float[Tensor, "S"]:
    """Mean reward of each one's group, over the rewards that are not NaN (NaN where a group has none).

    >>> group_mean(torch.tensor([1., 0., float("nan")]), group_ids=torch.tensor([5, 5, 5])).tolist()
    [0.5, 0.5, 0.5]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    total = segment_sum(rewards.nan_to_num(0.0), ids=ids, size=size)
    return (total / segment_count(known, ids=ids, size=size))[ids]


def group_std(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"], ddof: int = 1) -> Float[Tensor, "S"]:
    """Standard deviation of each one's group with ``ddof`` degrees of freedom taken off; NaN rewards are left out.

    A group of no more than ``ddof`` known rewards has no such number: NaN.

    >>> group_std(torch.tensor([1., 0., 0., 0.]), group_ids=torch.zeros(4, dtype=torch.int64)).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    squares = ((rewards - group_mean(rewards, group_ids=group_ids)) ** 2).nan_to_num(0.0)
    freedom = (segment_count(known, ids=ids, size=size) - ddof).to(rewards.dtype)
    variance = segment_sum(squares, ids=ids, size=size) / torch.where(freedom > 0, freedom, torch.nan)
    return variance.sqrt()[ids]


def has_signal(rewards: Float[Tensor, "S"], *, group_ids: Int[Tensor, "S"]) -> Bool[Tensor, "S"]:
    """Whether the rewards of each one's group differ: max - min above rounding error.

    Decided on the spread and not on the standard deviation, which float rounding can leave above 0 for equal rewards;
    dividing by it would then manufacture a signal.

    >>> has_signal(torch.tensor([.7, .7, 1., 0.]), group_ids=torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    ids, size = dense_ids(group_ids)
    known = ~rewards.isnan()
    low = torch.full((size,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    low = low.scatter_reduce(0, ids, torch.where(known, rewards, torch.inf), "amin")
    high = torch.full((size,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = high.scatter_reduce(0, ids, torch.where(known, rewards, -torch.inf), "amax")
    tolerance = 1e-6 * torch.maximum(low.abs(), high.abs()).clamp(min=1e-6)
    return (high - low > tolerance)[ids]
