"""``Objective``: an algorithm as a composition of independent choices, computing one coefficient per token.

    C_t = share_t c_t w(r_t, A_t) r_t A_t  -  beta share_t d_t
    gradient of the loss = - sum_t C_t grad log pi_t

Everything but log pi_t is detached. ``prepare`` looks at the whole optimizer step (rewards -> advantages and
denominators); ``loss`` may then be called on any split of it into whole sequences: the gradients add up to the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import DataError
from ..types import Metrics
from .advantage import Advantage, Coupling
from .aggregate import Aggregate
from .batch import Denominators, TokenBatch
from .correction import Correction
from .divergence import KLInLoss, kl_value
from .filter import Keep, MixedGroups, total_reward
from .ratio import Ratio, TokenRatio
from .segments import dense_ids, has_signal, segment_count
from .shaping import Shape
from .weight import Weight

_ORDER: tuple[Coupling, ...] = ("token", "sequence", "group", "batch")


@dataclass(frozen=True, eq=False)
class LossOutput:
    """What ``Objective.loss`` returns; ``advantages`` and ``coefficients`` have the batch's layout, (B, T) or (N,).

    ``loss`` has the surrogate's value (to be looked at) and the gradient ``-sum_t C_t grad log pi_t``;
    ``coefficients`` is C_t with the share in it.
    """

    loss: Float[Tensor, ""]
    advantages: Tensor
    coefficients: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Objective:
    """One algorithm of the family; a frozen value. ``dataclasses.replace`` exchanges single choices."""

    name: str
    advantage: Advantage
    weight: Weight
    aggregate: Aggregate
    ratio: Ratio = field(default_factory=TokenRatio)
    divergence: KLInLoss = field(default_factory=KLInLoss)
    correction: Correction | None = None
    shape: tuple[Shape, ...] = ()
    keep: tuple[Keep, ...] = ()

    @property
    def beta(self) -> float:
        """Coefficient of the KL term; a reference model is needed iff it is above 0."""
        return self.divergence.beta

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups without signal are to be replaced by freshly sampled ones."""
        return any(isinstance(k, MixedGroups) for k in self.keep)

    @property
    def couples(self) -> Coupling:
        """The least set of tokens that ``loss`` must see together once ``prepare`` has seen the whole step."""
        pieces: list[Any] = [self.ratio, self.weight, self.aggregate, self.divergence]
        pieces += [self.correction] if self.correction else []
        return max((p.couples for p in pieces), key=_ORDER.index)

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Fills in advantages and denominators from the whole step; ``logprobs`` are not looked at.

        Sequences that a filter drops, or whose reward is NaN, lose their mask and leave the denominators. Given
        advantages and denominators are kept as they are.
        """
        advantages = batch.advantages
        if advantages is None:
            if batch.rewards is None:
                raise DataError("rewards: got None; give rewards or advantages")
            if batch.rewards.isinf().any():
                raise DataError("rewards: got inf; accepts finite numbers, and NaN for 'does not apply'")
            rewards = total_reward(batch.rewards).to(torch.float64)
            stays = ~rewards.isnan()
            for keep in self.keep:
                stays &= keep(batch)
            for shape in self.shape:
                rewards = shape(rewards, batch=batch)
            per_sequence = self.advantage(torch.where(stays, rewards, torch.nan), group_ids=batch.group_ids)
            batch = batch.replace(mask=batch.mask & stays[batch.sequence_ids])
            advantages = per_sequence.to(batch.logprobs.dtype)[batch.sequence_ids]
        denominators = batch.denominators or Denominators.of(batch)
        return batch.replace(advantages=advantages * batch.mask, denominators=denominators)

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Loss, coefficients and metrics of a batch: of a whole step, or of some sequences of a prepared one."""
        whole = batch.advantages is None
        if whole or batch.denominators is None:
            batch = self.prepare(batch)
        assert batch.advantages is not None
        assert batch.denominators is not None
        advantages, mask = batch.advantages, batch.mask
        if self.beta > 0 and batch.ref_logprobs is None:
            raise DataError(
                f"ref_logprobs: got None; beta = {self.beta:g} needs the reference policy's log-probabilities"
            )

        ratio = self.ratio(batch)
        weight = self.weight(ratio, advantages=advantages)
        share = self.aggregate(batch, denominators=batch.denominators) * mask
        scale = share if self.correction is None else share * self.correction(batch)
        coefficients = scale * weight * ratio * advantages
        value = -(scale * self.weight.surrogate(ratio, advantages=advantages))
        if self.beta > 0:
            assert batch.ref_logprobs is not None
            derivative = self.divergence.derivative(batch.logprobs, ref_logprobs=batch.ref_logprobs)
            coefficients = coefficients - self.beta * share * derivative
            value = value + self.beta * share * self.divergence.value(batch.logprobs, ref_logprobs=batch.ref_logprobs)

        # Where the mask is off nothing may leak, not even 0 * nan.
        coefficients = torch.where(mask, coefficients, 0.0).to(batch.logprobs.dtype)
        carrier = -(coefficients * torch.where(mask, batch.logprobs, 0.0)).sum()
        loss = torch.where(mask, value, 0.0).sum().to(carrier.dtype) + (carrier - carrier.detach())
        metrics = {**token_metrics(batch, ratio=ratio, weight=weight), **(step_metrics(batch) if whole else {})}
        return LossOutput(loss, batch.unpack(advantages), batch.unpack(coefficients), metrics)

    def equation(self) -> str:
        """All choices as text, one line each."""
        lines = ["C_t = share_t w(r_t, A_t) r_t A_t" if self.correction is None else "C_t = share_t c_t w r_t A_t"]
        if self.beta:
            lines[0] += " - beta share_t d_t"
        rows: list[tuple[str, Any]] = [("keep", k) for k in self.keep]
        rows += [("shape", s) for s in self.shape]
        rows += [("advantage", self.advantage), ("ratio", self.ratio), ("weight", self.weight)]
        rows += [("correction", self.correction)] if self.correction else []
        rows += [("aggregate", self.aggregate)]
        rows += [("divergence", self.divergence)] if self.beta else []
        return "\n".join(lines + [f"  {name:<10} {piece.equation()}" for name, piece in rows])

    def replace(self, **choices: Any) -> Objective:
        """A copy with some choices exchanged."""
        return dataclasses.replace(self, **choices)


def token_metrics(batch: TokenBatch, *, ratio: Tensor, weight: Tensor) -> Metrics:
    """(sum, count) pairs over the loss tokens; they add up over any split of a step."""
    mask, advantages = batch.mask, batch.advantages
    assert advantages is not None
    moved = (advantages != 0) & mask
    count = float(mask.sum())

    def total(values: Tensor, where: Tensor = mask) -> float:
        return float(torch.where(where, values, 0.0).sum(dtype=torch.float64))

    blocked = ((weight == 0) & moved).to(ratio.dtype)
    out = {
        "ratio": (total(ratio), count),
        "weight": (total(weight, moved), float(moved.sum())),
        "clip_share": (total(blocked), count),
        "clip_share_high": (total(blocked * (ratio > 1)), count),
        "clip_share_low": (total(blocked * (ratio < 1)), count),
    }
    logprobs = batch.logprobs.detach()
    anchors = {"kl_old": batch.old_logprobs, "kl": batch.ref_logprobs, "kl_rollout": batch.rollout_logprobs}
    for name, anchor in anchors.items():
        if anchor is not None:
            # Samples come from the anchor (old, rollout) or from the policy (reference): k3 in the matching direction.
            first, second = (logprobs, anchor) if name == "kl" else (anchor, logprobs)
            out[name] = (total(kl_value(first, ref_logprobs=second)), count)
    if batch.entropies is not None:
        out["entropy"] = (total(batch.entropies), count)
    return out


def step_metrics(batch: TokenBatch) -> Metrics:
    """(sum, count) pairs that need whole groups: computed once on the whole step."""
    out: dict[str, tuple[float, float]] = {}
    if batch.rewards is not None:
        rewards = total_reward(batch.rewards)
        known = ~rewards.isnan()
        ids, size = dense_ids(batch.group_ids)
        alive = segment_count(has_signal(rewards, group_ids=batch.group_ids), ids=ids, size=size) > 0
        out["zero_signal_share"] = (float((~alive).sum()), float(size))
        out["reward"] = (float(rewards.nansum()), float(known.sum()))
        out["unscored_share"] = (float((~known).sum()), float(len(known)))
    if batch.truncated is not None:
        out["truncated_share"] = (float(batch.truncated.sum()), float(len(batch.truncated)))
    return out
