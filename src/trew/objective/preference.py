"""TRPA: a loss over pairs of completions. It is no ``Objective``, since a token's coefficient depends on the current
log-ratios of other completions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import DataError
from .batch import TokenBatch
from .ratio import LOG_RATIO_LIMIT
from .segments import segment_mean


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
    factor = torch.where(levels == 1, torch.full_like(z, best_factor), 1.0)
    better, worse = (peers & (levels[:, None] < levels)).nonzero(as_tuple=True)
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
