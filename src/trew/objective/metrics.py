"""What a user must see to notice that an objective misbehaves: (sum, count) pairs by name."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..types import Metrics
from .batch import TokenBatch
from .divergence import kl_value
from .segments import dense_ids, has_signal, segment_count

QUANTILES = {"ratio_q01": 0.01, "ratio_q50": 0.5, "ratio_q99": 0.99}


def token_metrics(
    batch: TokenBatch, *, ratio: Float[Tensor, "N"], weight: Float[Tensor, "N"], correction: Float[Tensor, "N"] | None
) -> Metrics:
    """Over the loss tokens of a prepared batch.

    ``clip_share`` is the share of tokens whose push is cut off altogether (w = 0 though A is not), and its four parts
    say on which side of r = 1 and for which sign of A. ``weight`` is the mean of w where A is not 0. ``ess`` is the
    effective sample size of the importance weights g = c w r there, (sum g)^2 / (n sum g^2): 1 where all count alike,
    1/n where one token decides. Quantiles and ess are of this batch, with count 1; all others add up over any split.
    ``kl_old`` and ``kl_rollout`` are k3 from the anchor to the policy, since the anchor has sampled; ``kl`` is k3 from
    the policy to the reference.
    """
    mask, advantages = batch.mask, batch.advantages
    assert advantages is not None
    moved = (advantages != 0) & mask
    count, active = float(mask.sum()), float(moved.sum())

    def total(values: Tensor, where: Tensor = mask) -> float:
        return float(torch.where(where, values, 0.0).sum(dtype=torch.float64))

    def share(where: Tensor) -> tuple[float, float]:
        return float(where.sum()), count

    cut = (weight == 0) & moved
    high, low, positive, negative = ratio > 1, ratio < 1, advantages > 0, advantages < 0
    out = {
        "ratio": (total(ratio), count),
        "weight": (total(weight, moved), active),
        "clip_share": share(cut),
        "clip_high_positive": share(cut & high & positive),
        "clip_high_negative": share(cut & high & negative),
        "clip_low_positive": share(cut & low & positive),
        "clip_low_negative": share(cut & low & negative),
    }
    importance = weight * ratio if correction is None else weight * ratio * correction
    out["ess"] = (_effective(importance, where=moved), 1.0 if active else 0.0)
    if correction is not None:
        out["correction"] = (total(correction), count)
        out["correction_zero_share"] = share((correction == 0) & mask)
    known = ratio[mask].sort().values
    for name, q in QUANTILES.items() if len(known) else ():
        out[name] = (float(known[round(q * (len(known) - 1))]), 1.0)
    anchors = {"kl_old": batch.old_logprobs, "kl": batch.ref_logprobs, "kl_rollout": batch.rollout_logprobs}
    for name, anchor in anchors.items():
        if anchor is not None:
            first, second = (batch.policy, anchor) if name == "kl" else (anchor, batch.policy)
            out[name] = (total(kl_value(first, ref_logprobs=second)), count)
    if batch.entropies is not None:
        out["entropy"] = (total(batch.entropies.detach()), count)
    return out


def _effective(importance: Float[Tensor, "N"], *, where: Bool[Tensor, "N"]) -> float:
    g = torch.where(where, importance, 0.0).to(torch.float64)
    squares = float((g**2).sum())
    return float(g.sum()) ** 2 / (float(where.sum()) * squares) if squares else 0.0


def step_metrics(batch: TokenBatch) -> Metrics:
    """What needs whole groups: computed once, on the whole step."""
    out: dict[str, tuple[float, float]] = {}
    if batch.rewards is not None:
        rewards = batch.total_rewards
        known = ~rewards.isnan()
        ids, size = dense_ids(batch.group_ids)
        alive = segment_count(has_signal(rewards, group_ids=batch.group_ids), ids=ids, size=size) > 0
        out["zero_signal_share"] = (float((~alive).sum()), float(size))
        out["reward"] = (float(rewards.nansum()), float(known.sum()))
        out["unscored_share"] = (float((~known).sum()), float(len(known)))
    if batch.truncated is not None:
        out["truncated_share"] = (float(batch.truncated.sum()), float(len(batch.truncated)))
    return out
