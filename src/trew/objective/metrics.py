"""Metrics that show when an objective misbehaves: (sum, count) pairs by name."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..types import Metrics
from .batch import TokenBatch
from .divergence import kl_value
from .segments import dense_ids, has_signal, segment_count, subgroups

QUANTILES = {"ratio_q01": 0.01, "ratio_q50": 0.5, "ratio_q99": 0.99}


def token_metrics(
    batch: TokenBatch,
    *,
    ratio: Float[Tensor, "N"],
    weight: Float[Tensor, "N"],
    correction: Float[Tensor, "N"] | None,
    importance: Float[Tensor, "N"] | None = None,
    likelihood: Float[Tensor, "N"] | None = None,
    margins: Float[Tensor, "N"] | None = None,
) -> Metrics:
    """Metrics over the loss tokens of a prepared batch.

    ``clip_share`` is the share of tokens whose push is cut off altogether (w = 0 though A is not), and its four parts
    say on which side of r = 1 and for which sign of A. ``weight`` is the mean of w where A is not 0. ``ess`` is the
    effective sample size of the importance weights g = c w r there, (sum g)^2 / (n sum g^2): 1 where all count alike,
    1/n where one token decides; ``importance`` is g where r has taken in a correction, which c then leaves out.
    Quantiles and ess are of this batch, with count 1; all others add up over any split.
    ``kl_old`` and ``kl_rollout`` are k3 from the anchor to the policy, since the anchor has sampled; ``kl`` is k3 from
    the policy to the reference. ``kl_teacher`` is k1 from the old policy to the teacher, whose mean is that of KL over
    what the old policy sampled: with on-policy distillation, the mean advantage is minus its coefficient times it.
    ``nll_correct`` is the mean of - log pi where ``likelihood``, the coefficient of a likelihood term, is above 0.
    ``preference_margin`` is the mean of ``margins`` over completions, and ``preference_accuracy`` the share above 0.
    """
    mask, advantages = batch.mask, batch.advantages
    assert advantages is not None
    # A token with advantage 0 has no push to clip: counting it would dilute weight, clip shares and ess.
    pushed = (advantages != 0) & mask
    count, active = float(mask.sum()), float(pushed.sum())
    if importance is None:
        importance = weight * ratio if correction is None else weight * ratio * correction
    out = {
        "ratio": (_total(ratio, where=mask), count),
        "weight": (_total(weight, where=pushed), active),
        **_clipped(ratio, advantages, where=(weight == 0) & pushed, count=count),
        "ess": (_effective(importance, where=pushed), 1.0 if active else 0.0),
    }
    if correction is not None:
        out["correction"] = (_total(correction, where=mask), count)
        out["correction_zero_share"] = (float(((correction == 0) & mask).sum()), count)
    out |= _quantiles(ratio[mask])
    out |= {name: (_total(k3, where=mask), count) for name, k3 in _divergences(batch).items()}
    if batch.entropies is not None:
        out["entropy"] = (_total(batch.entropies.detach(), where=mask), count)
    if likelihood is not None:
        correct = (likelihood > 0) & mask
        out["nll_correct"] = (_total(-batch.policy, where=correct), float(correct.sum()))
    if margins is not None:
        out |= _preferences(margins, batch)
    return out


def _preferences(margins: Float[Tensor, "N"], batch: TokenBatch) -> Metrics:
    # NaN: no completion of the group is on the other side.
    compared = batch.mask & ~margins.isnan()
    one = 1.0 / batch.lengths.clamp(min=1)[batch.sequence_ids].to(torch.float64)  # a completion counts once
    count = _total(one, where=compared)
    return {
        "preference_margin": (_total(margins * one, where=compared), count),
        "preference_accuracy": (_total((margins > 0) * one, where=compared), count),
    }


def _total(values: Tensor, *, where: Tensor) -> float:
    return float(torch.where(where, values, 0.0).sum(dtype=torch.float64))


def _clipped(ratio: Tensor, advantages: Tensor, *, where: Tensor, count: float) -> Metrics:
    """Shares of ``count`` tokens that are clipped, in all and by side and sign."""
    high, low, positive, negative = ratio > 1, ratio < 1, advantages > 0, advantages < 0
    parts = {
        "clip_share": where,
        "clip_high_positive": where & high & positive,
        "clip_high_negative": where & high & negative,
        "clip_low_positive": where & low & positive,
        "clip_low_negative": where & low & negative,
    }
    return {name: (float(part.sum()), count) for name, part in parts.items()}


def _quantiles(ratios: Tensor) -> Metrics:
    if not len(ratios):
        return {}
    # A value of the data and not an interpolation, over an index that rounds to the nearest rank.
    known = ratios.sort().values  # torch.quantile refuses more than 2^24 values
    return {name: (float(known[round(q * (len(known) - 1))]), 1.0) for name, q in QUANTILES.items()}


def _divergences(batch: TokenBatch) -> dict[str, Tensor]:
    """KL estimates per token by metric, for the anchors that the batch has. k3 is unbiased over samples of its first
    policy; it would be dominated by the rare tokens that a teacher finds far more probable, so for that it is k1."""
    policy, found = batch.policy, {}
    if batch.old_logprobs is not None:
        found["kl_old"] = kl_value(batch.old_logprobs, ref_logprobs=policy)
    if batch.ref_logprobs is not None:
        found["kl"] = kl_value(policy, ref_logprobs=batch.ref_logprobs)
    if batch.teacher_logprobs is not None:
        found["kl_teacher"] = batch.old - batch.teacher_logprobs
    if batch.rollout_logprobs is not None:
        found["kl_rollout"] = kl_value(batch.rollout_logprobs, ref_logprobs=policy)
    return found


def _effective(importance: Float[Tensor, "N"], *, where: Bool[Tensor, "N"]) -> float:
    """Effective sample size as a share of the tokens; 0 if all importance weights are 0."""
    g = torch.where(where, importance, 0.0).to(torch.float64)
    squares = float((g**2).sum())  # in float64: next to the square of a ratio of 5e8, float32 drops all others
    return float(g.sum()) ** 2 / (float(where.sum()) * squares) if squares else 0.0


def step_metrics(batch: TokenBatch) -> Metrics:
    """Metrics that need whole groups: computed once, on the whole step."""
    out: dict[str, tuple[float, float]] = {}
    if batch.rewards is not None:
        rewards = batch.total_rewards
        known = ~rewards.isnan()
        ids, size = dense_ids(batch.group_ids)
        # (S,) -> (groups,): has_signal() repeats the answer for each sequence of a group.
        alive = segment_count(has_signal(rewards, group_ids=batch.group_ids), ids=ids, size=size) > 0
        out["zero_signal_share"] = (float((~alive).sum()), float(size))
        out["reward"] = (float(rewards.nansum()), float(known.sum()))
        out["unscored_share"] = (float((~known).sum()), float(len(known)))
    if batch.turns is not None and batch.turns.states is not None:
        alike = subgroups(batch.turns.states, group_ids=batch.group_ids[batch.turns.sequence_ids])
        # Turns that GiGPO compares with another: without any, it is GRPO, and nothing else would show it.
        out["shared_state_share"] = (float((torch.bincount(alike)[alike] > 1).sum()), float(len(alike)))
    if batch.truncated is not None:
        out["truncated_share"] = (float(batch.truncated.sum()), float(len(batch.truncated)))
    return out
