"""DPO and TRPA: losses over pairs of completions, as functions for a loop of your own. DPO is the preset ``dpo``, too;
TRPA is none, since its pairs are those of all levels, each with a factor of its own."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import DataError
from .batch import TokenBatch
from .component import positive
from .ratio import LOG_RATIO_LIMIT
from .segments import dense_ids, segment_count, segment_mean, segment_sum


def trpa_loss(
    batch: TokenBatch,
    *,
    levels: Int[Tensor, "S"],
    beta: float = 0.1,
    best_factor: float = 2.5,
    anchor: float = 0.001,
) -> Float[Tensor, ""]:
    """Trust Region Preference Approximation: arXiv 2504.04524.

        L = - mean_(i better than j) log sigma(h_ij) + anchor mean_t k3(pi ; pi_old)
        h_ij = c_i beta (z_i - z_j),   z_i = mean_t log(pi / pi_ref),   c_i = best_factor if level_i = 1, else 1

    ``levels`` (S,) ranks completions, 1 the best; pairs are formed within groups. In a group with a single level each
    completion counts by itself: h_i = c_i beta z_i at level 1, -beta z_i below. Sequences without loss tokens take no
    part. Differentiable through ``batch.logprobs``, which must be those of whole groups; the trust region is
    the k3 term, whose samples are the old policy's. Raises DataError without ``ref_logprobs``.

    >>> log_ratio = torch.tensor([[0.2], [-0.1]])
    >>> batch = TokenBatch.from_padded(logprobs=log_ratio - 1, ref_logprobs=torch.full((2, 1), -1.0),
    ...     mask=torch.ones(2, 1), rewards=torch.tensor([1., 0.]), group_ids=torch.tensor([0, 0]))
    >>> round(trpa_loss(batch, levels=torch.tensor([1, 2])).item(), 6)
    0.65635
    """
    if batch.ref_logprobs is None:
        raise DataError("ref_logprobs: got None; TRPA compares completions by log(pi / pi_ref)")
    if levels.shape != batch.group_ids.shape:
        raise DataError(f"levels: got shape {tuple(levels.shape)}, accepts ({batch.size},)")
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.ref_logprobs, 0.0)
    z = segment_mean(log_ratio, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)
    alive = batch.lengths > 0
    # All pairs as (S, S): there are far fewer completions than tokens.
    peers = (batch.group_ids[:, None] == batch.group_ids) & alive[:, None] & alive
    # c_i, (S,)
    factor = torch.where(levels == 1, torch.full_like(z, best_factor), 1.0)
    # Pairs (i, j) of a group with level_i < level_j: level 1 is the best.
    better, worse = (peers & (levels[:, None] < levels)).nonzero(as_tuple=True)
    # Completions of a group with a single level: nobody to be compared with.
    alone = (alive & ~(peers & (levels[:, None] != levels)).any(dim=1)).nonzero().squeeze(1)
    sign = torch.where(levels[alone] == 1, 1.0, -1.0)
    # logsigmoid of both kinds together, so that every pair and every lone completion counts once in the mean.
    h = torch.cat([factor[better] * (z[better] - z[worse]), sign * factor[alone] * z[alone]]) * beta
    loss = -logsigmoid(h).sum() / max(len(h), 1)
    if batch.old_logprobs is None:  # the policy has not moved: k3 and its derivative are 0
        return loss
    d = (batch.logprobs - batch.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = torch.where(batch.mask, torch.expm1(-d) + d, 0.0)
    return loss + anchor * k3.sum() / batch.mask.sum().clamp(min=1)


def implicit_rewards(batch: TokenBatch, *, beta: float = 0.1) -> Float[Tensor, "S"]:
    """beta sum_t log(pi / pi_ref) of each completion: the reward that a policy implies by DPO, arXiv 2305.18290 §4.

    Differentiable through ``batch.logprobs``; 0 for a completion without loss tokens. Raises DataError without
    ``ref_logprobs``.

    >>> log_ratio = torch.tensor([[0.2, 0.3], [-0.1, 0.0]])
    >>> batch = TokenBatch.from_padded(logprobs=log_ratio - 1, ref_logprobs=torch.full((2, 2), -1.0),
    ...     mask=torch.tensor([[1, 1], [1, 0]]), rewards=torch.tensor([1., -1.]), group_ids=torch.tensor([0, 0]))
    >>> [round(r, 6) for r in implicit_rewards(batch).tolist()]
    [0.05, -0.01]
    """
    if batch.ref_logprobs is None:
        raise DataError("ref_logprobs: got None; DPO compares completions by log(pi / pi_ref)")
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.ref_logprobs, 0.0)
    return beta * segment_sum(log_ratio, ids=batch.sequence_ids, size=batch.size)


def dpo_loss(batch: TokenBatch, *, beta: float = 0.1, pairs: int | None = None) -> Float[Tensor, ""]:
    """Direct Preference Optimization: arXiv 2305.18290, eq. 7.

        L = - 1/P sum_pairs log sigma(m),   m = z_chosen - z_rejected
        gradient = - 1/P sum_pairs beta sigma(-m) (grad log pi(chosen) - grad log pi(rejected))

    z are the :func:`implicit_rewards`. The second line is DPO's gradient coefficient of arXiv 2402.03300, App. A.1:
    beta sigma(-m) at each token of the chosen completion and its negative at those of the rejected one. The preset
    ``dpo`` has the same value and gradient.

    A pair is a group of two completions with different rewards, of which the higher is the chosen one's. ``pairs`` is
    P, those of the whole optimizer step where ``batch`` is a part of it in whole groups; by default all are here. The
    completions are used as they are, without a ratio to the policy that sampled them.

    Raises DataError without ``ref_logprobs`` or rewards, and for a group that is no pair; ValueError for a beta that is
    not above 0.

    >>> log_ratio = torch.tensor([[2.0], [-1.0]])
    >>> batch = TokenBatch.from_padded(logprobs=log_ratio - 3, ref_logprobs=torch.full((2, 1), -3.0),
    ...     mask=torch.ones(2, 1), rewards=torch.tensor([1., -1.]), group_ids=torch.tensor([0, 0]))
    >>> round(dpo_loss(batch, beta=0.1).item(), 6)  # log(1 + exp(-0.3))
    0.554355
    """
    positive(beta=beta)
    z = implicit_rewards(batch, beta=beta)
    chosen, rejected = _pairs(batch)
    return -logsigmoid(z[chosen] - z[rejected]).sum() / max(len(chosen) if pairs is None else pairs, 1)


def _pairs(batch: TokenBatch) -> tuple[Int[Tensor, "P"], Int[Tensor, "P"]]:
    """The chosen and the rejected completion of each group. Raises DataError for a group that is no pair."""
    if batch.rewards is None:
        raise DataError("rewards: got None; DPO must know which completion of a pair was chosen: give it the higher")
    ids, size = dense_ids(batch.group_ids)
    counts = segment_count(torch.ones_like(ids, dtype=torch.bool), ids=ids, size=size)
    if (odd := (counts[ids] != 2).nonzero()).numel():
        first = int(odd[0])
        raise DataError(
            f"group_ids: group {int(batch.group_ids[first])} has {int(counts[ids[first]])} completions, accepts 2, the "
            "chosen and the rejected one; trpa_loss compares larger groups"
        )
    # Sorted by group, the two of each stand side by side: (2 P,) -> (P, 2).
    first, second = torch.argsort(ids, stable=True).view(-1, 2).unbind(1)
    gap = batch.total_rewards[first] - batch.total_rewards[second]
    if (equal := (~(gap.abs() > 0)).nonzero()).numel():  # NaN, too
        i = int(first[equal[0]])
        raise DataError(
            f"rewards: group {int(batch.group_ids[i])} has two equal ones, or one that is NaN; the chosen completion's "
            "must be higher"
        )
    return torch.where(gap > 0, first, second), torch.where(gap > 0, second, first)
