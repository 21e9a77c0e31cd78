"""``Objective``: an algorithm as a composition of independent choices, computing one coefficient per token.

    C_t = share_t c_t w(r_t, A_t) r_t A_t  -  share_t d_t
    gradient of the loss = - sum_t C_t grad log pi_t

share_t is the token's weight in the average (``TokenBatch.token_weights``), c_t the mismatch correction, w the trust
region, r_t the importance ratio, A_t the advantage, d_t the divergence's derivative. Everything but log pi_t is
detached. ``prepare`` sees the whole optimizer step (rewards -> advantages, denominators, token weights); ``loss`` may
then be called on any split of it into whole sequences: the gradients add up to the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import DataError
from ..types import Metrics
from . import padded
from .adjust import Adjust
from .advantage import Advantage, ExternalAdvantages
from .aggregate import Aggregate, SequenceMeanTokenMean
from .batch import Denominators, TokenBatch
from .component import SCOPES, Component, Scope
from .correction import Bounded, Correction
from .distillation import Distillation
from .divergence import KL, PLACES, Divergence
from .entropy_bonus import EntropyBonus
from .filter import GroupFilter, LossMask, MixedGroups, TokenMask
from .kinds import refuse_other_kinds, refuse_unknown
from .likelihood import CorrectLikelihood, in_correct
from .metrics import step_metrics, token_metrics
from .notes import notes
from .preferred import PreferenceWeight
from .prepared import refuse_foreign, refuse_part
from .ratio import Ratio, TokenRatio, bounded_exp
from .renamed import message
from .returned import Watched, flags, of_advantage, of_sequences, of_tokens
from .segments import last_of, segment_mean, segment_sum, to_go
from .shaping import Shape
from .typeset import typeset
from .weight import Weight

AXES = ("keep", "shape", "advantage", "adjust", "prune", "select", "ratio", "weight", "correction", "aggregate")
"""An objective's choices in the order in which they act; ``divergence``, ``entropy_bonus`` and ``nll`` are added to
them."""


RENAMED = {"pieces": "components", "couples": "scope", "as_step": "renormalised_for"}
"""Members of ``Objective`` by the names that they had."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """What ``Objective.loss`` returns. Per-token values have the layout that the batch was made from, (B, T) or (N,).

    ``loss`` has the surrogate's value (for logs) and the gradient ``-sum_t C_t grad log pi_t``, plus that of the
    entropy bonus where the objective has one. ``coefficients`` is C_t, the token weight included. ``ratios`` and
    ``weights`` are r_t and w_t.
    """

    loss: Float[Tensor, ""]
    batch: TokenBatch
    packed: dict[str, Tensor]
    whole: bool

    @property
    def advantages(self) -> Tensor:
        assert self.batch.advantages is not None
        return self.batch.unpack(self.batch.advantages)

    @property
    def coefficients(self) -> Tensor:
        return self.batch.unpack(self.packed["coefficients"])

    @property
    def ratios(self) -> Tensor:
        return self.batch.unpack(self.packed["ratio"])

    @property
    def weights(self) -> Tensor:
        return self.batch.unpack(self.packed["weight"])

    @cached_property
    def metrics(self) -> Metrics:
        """(sum, count) by name: :func:`token_metrics`, and :func:`step_metrics` where this is a whole step."""
        tokens = token_metrics(
            self.batch, ratio=self.packed["ratio"], weight=self.packed["weight"],
            **{name: self.packed.get(name) for name in ("correction", "importance", "likelihood", "margins")},
        )  # fmt: skip
        return {**tokens, **(step_metrics(self.batch) if self.whole else {})}


@dataclass(frozen=True)
class Objective:
    """One algorithm of the family: a frozen value made of components. ``replace`` exchanges some of them.

    Its repr is its name and its equation with all numbers; a notebook shows the same as LaTeX. Raises ValueError for
    components that contradict each other, for what is no component of its axis, and for one that should be in a tuple.
    """

    name: str
    advantage: Advantage
    weight: Weight
    aggregate: Aggregate
    ratio: Ratio = field(default_factory=TokenRatio)
    keep: tuple[GroupFilter, ...] = ()
    shape: tuple[Shape, ...] = ()
    adjust: tuple[Adjust, ...] = ()
    prune: tuple[LossMask, ...] = ()
    select: tuple[TokenMask, ...] = ()
    correction: tuple[Correction, ...] = ()
    divergence: tuple[Divergence, ...] = (KL(),)
    entropy_bonus: EntropyBonus = field(default_factory=EntropyBonus)
    nll: CorrectLikelihood = field(default_factory=CorrectLikelihood)

    def __post_init__(self) -> None:
        refuse_other_kinds(self)
        if self.ratio.anchor == "rollout" and any(c.mismatch for c in self.correction):
            raise ValueError(
                f"correction: {self.name}'s ratio is measured against the sampler already, and a correction for the "
                "same mismatch would count it twice; accepts 'none' or 'opsm' here"
            )
        if not self.advantage.reads_rewards:
            self._refuse_unread_shape()
        self._refuse_unread_kl()
        if isinstance(self.weight, PreferenceWeight) and isinstance(self.aggregate, SequenceMeanTokenMean):
            raise ValueError(
                f"aggregate: {self.name} compares log-ratios of whole completions, and a mean over the tokens of each "
                "would give the two of a pair different shares, with a gradient that is that of no loss; accepts others"
            )
        if isinstance(self.advantage, ExternalAdvantages) and self.distillation:
            raise ValueError(
                f"distill: got {self.distillation:g}, but {self.name} takes its advantages as they are given, and "
                "nothing is added to them; accepts 0 here"
            )

    def _refuse_unread_shape(self) -> None:
        for shape in self.shape:
            raise ValueError(
                f"overlong_cache: {self.name}'s advantages do not read the reward's value, so nothing can be added to "
                f"it; accepts 0 here (got {shape.equation()})"
            )

    def _refuse_unread_kl(self) -> None:
        """Raises ValueError for a KL term in a place that the advantages do not read: it would have no effect."""
        unread, why = ("reward",) if not self.advantage.reads_rewards else (), "do not read it"
        if self.advantage.per_reward:
            unread, why = ("reward",), "divide it by its own deviation, so that its coefficient would have no effect"
        if self.advantage.per_token_rewards:  # estimated from the rewards of tokens, in which the KL is already
            unread = ("to-go",)
        if isinstance(self.advantage, ExternalAdvantages):  # final as given, so nothing is subtracted from them either
            unread = ("reward", "to-go")
        for kl in self._in_advantage(*unread):
            raise ValueError(
                f"kl_place: got {kl.place!r}, but {self.name}'s advantages {why}; accepts "
                f"{' or '.join(repr(place) for place in PLACES if place not in unread)} here"
            )

    def components(self) -> Iterator[tuple[str, Component]]:
        """(axis, component) of all that act, in the order in which they act."""
        for axis in AXES:
            chosen = getattr(self, axis)
            yield from ((axis, component) for component in (chosen if isinstance(chosen, tuple) else (chosen,)))
        yield from (("divergence", term) for term in self.divergence if term.active)
        if self.entropy_bonus.active:
            yield "entropy", self.entropy_bonus
        if self.nll.active:
            yield "nll", self.nll

    @property
    def reference(self) -> KL:
        """The KL term against the reference policy; a term with beta = 0 if there is none."""
        return next((t for t in self.divergence if isinstance(t, KL) and t.anchor == "ref"), KL())

    @property
    def beta(self) -> float:
        """Coefficient of the KL to the reference policy; a reference model is needed iff it is above 0."""
        return self.reference.beta

    @property
    def distillation(self) -> float:
        """Coefficient of on-policy distillation; a teacher is needed iff it is above 0."""
        return next((a.coefficient for a in self.adjust if isinstance(a, Distillation)), 0.0)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups without signal are replaced by freshly sampled ones."""
        return any(isinstance(k, MixedGroups) for k in self.keep)

    @property
    def needs(self) -> tuple[str, ...]:
        """The optional fields of ``TokenBatch`` that it requires, each once."""
        return tuple(dict.fromkeys(name for _, component in self.components() for name in component.needs))

    @property
    def scope(self) -> Scope:
        """The smallest set of tokens that ``loss`` must see together once ``prepare`` has seen the whole step."""
        # What prepare() has computed (filters, advantages, token weights) needs no company any more.
        components: list[Component] = [self.ratio, self.weight, *self.correction, *self._in_loss()]
        return SCOPES[max(SCOPES.index(p.scope) for p in components)]

    @property
    def sees_step(self) -> bool:
        """Whether ``loss`` must see the whole optimizer step at once, so that all of its log-probs are computed before
        the first gradient."""
        return self.scope in ("group", "batch")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings whose effect their names do not say."""
        return notes(ratio=self.ratio, weight=self.weight, beta=self.beta)

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Adds advantages, denominators and token weights, computed from the whole step. The policy's ``logprobs`` are
        not read, unless the objective reads the old policy's and ``old_logprobs`` is None.

        Sequences that a filter drops, or whose reward (or baseline, where one is needed) is NaN, lose their mask and
        leave the denominators. Advantages that the batch already has are final: neither shaped nor adjusted.
        Denominators that it already has are kept. Raises DataError for a missing field and for numbers that are not
        finite.
        """
        self._refuse_infinite(batch)
        self._refuse_missing(batch)
        # ---- filters first: the sequences that they drop must not enter the statistics of the advantages
        watched = Watched(batch)
        stays = self._filtered(batch)
        batch = batch.replace(mask=batch.mask & stays[batch.sequence_ids])
        advantages = batch.advantages
        # Statistics are in float64; their results are rounded to the log-probs' dtype once.
        if advantages is None:
            rewards = self._shaped_rewards(batch, stays)
            advantages = self._advantages(rewards, batch).to(batch.logprobs.dtype)
            returns = self.advantage.returns(rewards, batch=batch)
            if returns is not None:
                returns = of_tokens(returns, self.advantage, batch=batch).to(batch.logprobs.dtype)
            batch = batch.replace(returns=returns)
        # Given advantages may hold anything outside the mask, NaN too.
        advantages = torch.where(batch.mask, advantages, 0.0)
        # ---- loss masks next: they read the advantages, which have counted every sequence
        if self.prune:
            mask = batch.mask & self._unpruned(batch, advantages, stays)[batch.sequence_ids]
            batch, advantages = batch.replace(mask=mask), torch.where(mask, advantages, 0.0)
        for select in self.select:
            # Only the advantage becomes 0: the token stays in the denominators, so that a selection of 20 % of the
            # tokens does not make each of them count five times as much.
            advantages = torch.where(flags(select(batch), select, batch.mask.shape, "token"), advantages, 0.0)
        watched.check()
        # Over the whole step and before it is split: an adaptive bonus must decide the same for every micro-batch.
        mean_entropy = None
        if batch.entropies is not None:
            one = torch.zeros_like(batch.sequence_ids)
            mean_entropy = float(segment_mean(batch.entropies.detach(), mask=batch.mask, ids=one, size=1))
        return self._with_token_weights(batch.replace(advantages=advantages, mean_entropy=mean_entropy))

    def renormalised_for(self, minibatch: TokenBatch) -> TokenBatch:
        """Selects sequences of a prepared batch as one optimizer step: new denominators and token weights,
        the same advantages."""
        assert minibatch.advantages is not None
        return self._with_token_weights(minibatch.replace(denominators=None))

    def has_gradient(self, batch: TokenBatch) -> Bool[Tensor, "N"]:
        """(N,) of a prepared batch: False for tokens that have no gradient whatever the policy is, since there is no
        advantage, no divergence in the loss, no entropy bonus that acts on this step and no likelihood of correct
        completions."""
        assert batch.advantages is not None
        # A divergence or an entropy bonus pushes every token, whatever its advantage.
        if self._in_loss() or self._bonus_acts(batch):
            return batch.mask
        pushed = batch.mask & (batch.advantages != 0)
        return pushed | in_correct(batch) if self.nll.active else pushed

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Loss, coefficients and metrics of a whole step, or of some sequences of a prepared step.

        Raises DataError if an objective with other advantages or token weights has prepared the step, if this one must
        see the whole step at once and is given a part of it, and if ``logprobs`` are not one for each token.
        """
        batch = batch.replace(logprobs=padded.of_stream("logprobs", batch.logprobs, like=batch.mask))
        # Without token weights nobody has prepared the batch: it is a whole step.
        whole = batch.token_weights is None
        batch = self.prepare(batch) if whole else batch
        refuse_foreign(batch, self)
        refuse_part(batch, self)
        advantages, token_weights, mask = batch.advantages, batch.token_weights, batch.mask
        assert advantages is not None
        assert token_weights is not None

        # ---- the coefficient of each token, all of it detached, and the value that the log reports
        watched = Watched(batch)
        ratio, outside, correction = self._corrected(batch)
        watched.add(ratio=ratio)
        weight = of_tokens(self.weight(ratio, advantages=advantages, batch=batch), self.weight, batch=batch)
        surrogate = self.weight.surrogate(ratio, advantages=advantages, batch=batch)
        surrogate = of_tokens(surrogate, self.weight, batch=batch)
        if self.ratio.per_sequence and not self.weight.linear:
            # S_i A_i is one term of the loss, but stands at each of the T_i tokens: each counts 1 / T_i of it. Its
            # gradient is not divided, since the derivative of S_i by every single log pi_t is S_i itself.
            surrogate = surrogate / batch.lengths[batch.sequence_ids].clamp(min=1)
        # share_t c_t, but for corrections that the ratio has taken in.
        scale = token_weights if outside is None else token_weights * outside
        coefficients = scale * weight * ratio * advantages
        value = -scale * surrogate
        # - share_t d_t: the corrections are for the push alone.
        for term in self._in_loss():
            coefficients = coefficients - token_weights * of_tokens(term.derivative(batch), term, batch=batch)
            value = value + token_weights * of_tokens(term.value(batch), term, batch=batch)
        # + n_t: neither ratio, trust region nor correction acts on the likelihood.
        likelihood = None
        if self.nll.active:
            assert batch.denominators is not None
            likelihood = self.nll.coefficients(batch, tokens=batch.denominators.correct_tokens)
            coefficients = coefficients + likelihood
            value = value - likelihood * batch.policy

        watched.check()
        # ---- the loss: a carrier of the gradient, and the value for the log
        # torch.where and no product with the mask: where the mask is off, 0 * nan would be nan.
        coefficients = torch.where(mask, coefficients, 0.0).detach().to(batch.logprobs.dtype)
        carrier = -(coefficients * torch.where(mask, batch.logprobs, 0.0)).sum()
        # The carrier has the gradient and, minus itself, the value 0: the value is the surrogate's, whose own gradient
        # would go through ratio and weight.
        loss = torch.where(mask, value, 0.0).sum().detach().to(carrier.dtype) + (carrier - carrier.detach())
        # Not a coefficient of log pi_t: its gradient goes through the whole distribution of each token.
        if self._bonus_acts(batch):
            loss = loss + self._bonus(batch)
        # ---- what is kept
        detached = batch.replace(logprobs=batch.policy)  # a LossOutput that is kept does not keep the graph
        packed = {"ratio": ratio, "weight": weight, "coefficients": coefficients}
        margins = self.weight.margins(advantages=advantages, batch=batch)
        optional = {"correction": correction, "likelihood": likelihood, "margins": margins}
        if outside is not correction:  # the ratio has one of them already, which must not count twice
            optional["importance"] = weight * ratio if outside is None else weight * ratio * outside
        packed |= {name: values for name, values in optional.items() if values is not None}
        return LossOutput(loss, detached, packed, whole)

    def _corrected(self, batch: TokenBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(ratio, product of the corrections beside it, product of all): each correction multiplies either the token's
        weight, or the ratio where the trust region takes it in. None: there are none."""
        ratio, outside, correction = of_tokens(self.ratio(batch), self.ratio, batch=batch), None, None
        for rule in self.correction:
            c = of_tokens(rule(batch), rule, batch=batch)
            correction = c if correction is None else correction * c
            # Added in log space and bounded again: a product over a long sequence can leave the range of float32.
            if rule.mismatch and self.weight.folds_correction:
                ratio = bounded_exp(ratio.log() + rule.log_of_sequence(c, batch=batch))
            else:
                outside = c if outside is None else outside * c
        return ratio, outside, correction

    def equation(self) -> str:
        """All components as text, one line each, and the notes."""
        outside = [c for c in self.correction if not (c.mismatch and self.weight.folds_correction)]
        c = " c_t" if outside else ""
        d, nll = " - share_t d_t" if self._in_loss() else "", " + n_t" if self.nll.active else ""
        lines = [f"C_t = share_t{c} w(r_t, A_t) r_t A_t{d}{nll}"]
        lines += [f"  {axis:<10} {component.equation()}" for axis, component in self.components()]
        return "\n".join(lines + [f"  {'note':<10} {note}" for note in self.notes])

    def __repr__(self) -> str:
        return f"Objective {self.name!r}\n{self.equation()}"

    def _repr_latex_(self) -> str:
        """Its equation for a notebook."""
        return typeset(self.equation())

    def replace(self, **choices: Any) -> Objective:
        """A copy with some components exchanged."""
        refuse_unknown(choices, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **choices)

    if not TYPE_CHECKING:  # a type checker would take every misspelled name for a known one

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(message("Objective", name, RENAMED))

    def corrected_share(self, batch: TokenBatch) -> float | None:
        """The share of loss tokens beyond the limits of the mismatch correction, which then counts them less than they
        should; None without a correction, or if the batch lacks the log-probs that it compares."""
        beyond = None if batch.old_logprobs is None else self.beyond_correction(batch)
        return None if beyond is None else beyond[0] / max(beyond[1], 1.0)

    def beyond_correction(self, batch: TokenBatch) -> tuple[float, float] | None:
        """How many of how many loss tokens :meth:`corrected_share` is about; None without a correction or the sampler's
        log-probs. The policy that has not moved is its own old policy: ``old_logprobs`` may be None."""
        bounded = [rule for rule in self.correction if isinstance(rule, Bounded)]
        if not bounded or batch.rollout_logprobs is None:
            return None
        beyond = torch.stack([rule.limited(batch) for rule in bounded]).any(0) & batch.mask
        return float(beyond.sum()), float(batch.mask.sum())

    def _in_loss(self) -> list[Divergence]:
        return [t for t in self.divergence if t.active and not (isinstance(t, KL) and t.place != "loss")]

    def _in_advantage(self, *places: str) -> list[KL]:
        return [t for t in self.divergence if isinstance(t, KL) and t.active and t.place in places]

    def _refuse_infinite(self, batch: TokenBatch) -> None:
        if batch.rewards is not None and batch.rewards.isinf().any():
            raise DataError("rewards: got inf; accepts finite numbers, and NaN for 'does not apply'")
        if batch.advantages is not None and not torch.where(batch.mask, batch.advantages, 0.0).isfinite().all():
            raise DataError("advantages: got nan or inf; accepts finite numbers, and 0 for sequences without a score")

    def _refuse_missing(self, batch: TokenBatch) -> None:
        """Raises DataError for the first field that a component needs and the batch lacks."""
        in_advantage = self._in_advantage("reward", "to-go")
        for axis, component in self.components():
            # Advantages that the batch has already are final, so nothing that leads to advantages is computed.
            if batch.advantages is not None and (axis in ("shape", "advantage", "adjust") or component in in_advantage):
                continue
            if axis == "nll" and batch.correct is not None:  # it reads rewards only where this is not given
                continue
            for name in component.needs:
                if getattr(batch, name) is None:
                    raise DataError(f"{name}: got None; {self.name} needs it for its {axis}: {component.equation()}")

    def _filtered(self, batch: TokenBatch) -> Bool[Tensor, "S"]:
        """True for the sequences that take part in the step: they have what they are judged by, and no filter drops
        them."""
        stays = torch.ones(batch.size, dtype=torch.bool, device=batch.mask.device)
        if batch.rewards is not None and self.advantage.judged:
            stays &= ~batch.total_rewards.isnan()
        # A missing baseline costs a sequence only where the objective reads baselines.
        if batch.baselines is not None and "baselines" in self.needs:
            stays &= ~batch.baselines.isnan()
        for keep in self.keep:
            stays &= flags(keep(batch), keep, batch.group_ids.shape, "sequence")
        return stays

    def _unpruned(self, batch: TokenBatch, advantages: Float[Tensor, "N"], stays: Bool[Tensor, "S"]) -> Tensor:
        """True (S,) for the sequences of ``stays`` that carry loss by every ``LossMask``."""
        largest = torch.zeros(batch.size, dtype=advantages.dtype, device=advantages.device)
        # (N,) -> (S,): a sequence counts by the token that is pushed most.
        largest = largest.scatter_reduce(0, batch.sequence_ids, advantages.abs(), "amax")
        largest = torch.where(stays, largest, torch.nan)  # NaN, not 0: a 0 would count in its group's size
        for prune in self.prune:
            stays = stays & flags(prune(largest, batch=batch), prune, batch.group_ids.shape, "sequence")
        return stays

    def _shaped_rewards(self, batch: TokenBatch, stays: Bool[Tensor, "S"]) -> Tensor:
        """(S,) total rewards with all shaping terms added, or (S, K + terms) where rewards are normalised one by one;
        float64, NaN for sequences that do not take part. (N,) where they are those of tokens, 0 outside the mask."""
        rewards = torch.zeros(batch.size, dtype=torch.float64, device=batch.mask.device)
        if batch.rewards is not None:
            rewards = batch.rewards.to(torch.float64) if self.advantage.per_reward else batch.total_rewards
        terms = [of_sequences(shape(batch), shape, batch=batch).to(torch.float64) for shape in self.shape]
        # (N,) each, while the terms are (S,).
        penalties = [kl.of_rollout(batch).to(torch.float64) for kl in self._in_advantage("reward")]
        # The sequence's reward stands at its last loss token. Sequences that do not stay have no loss token by now.
        if self.advantage.per_token_rewards:
            ends = last_of(batch.mask, ids=batch.sequence_ids, size=batch.size)
            return torch.where(ends, sum(terms, rewards)[batch.sequence_ids], 0.0) - sum(penalties)
        terms += [-segment_sum(per_token, ids=batch.sequence_ids, size=batch.size) for per_token in penalties]
        if not self.advantage.per_reward:
            return torch.where(stays, sum(terms, rewards), torch.nan)
        columns = rewards[:, None] if rewards.dim() == 1 else rewards
        return torch.where(stays[:, None], torch.stack([*columns.unbind(1), *terms], dim=1), torch.nan)

    def _advantages(self, rewards: Tensor, batch: TokenBatch) -> Float[Tensor, "N"]:
        """Shaped rewards -> advantages -> adjusted ones, per token, in float64."""
        advantages = of_advantage(self.advantage(rewards, batch=batch), self.advantage, batch=batch)
        advantages = torch.where(batch.mask, advantages, 0.0)
        # After baseline and scale, which would rescale beta by the group's deviation.
        for kl in self._in_advantage("to-go"):
            advantages = advantages - to_go(kl.of_rollout(batch), ids=batch.sequence_ids, size=batch.size)
        for adjust in self.adjust:
            advantages = of_tokens(adjust(advantages, batch=batch), adjust, batch=batch)
        return advantages

    def _with_token_weights(self, batch: TokenBatch) -> TokenBatch:
        denominators = batch.denominators or Denominators.of(batch)
        token_weights = of_tokens(self.aggregate(batch, denominators=denominators), self.aggregate, batch=batch)
        token_weights = token_weights.to(batch.logprobs.dtype) * batch.mask
        return batch.replace(denominators=denominators, token_weights=token_weights, prepared_by=self)

    def _bonus_acts(self, batch: TokenBatch) -> bool:
        return batch.mean_entropy is not None and self.entropy_bonus.applies(batch.mean_entropy)

    def _bonus(self, batch: TokenBatch) -> Tensor:
        assert batch.entropies is not None
        assert batch.token_weights is not None
        if batch.logprobs.requires_grad and not batch.entropies.requires_grad:
            raise DataError(
                "entropies: got values without a gradient; an entropy bonus trains them: give those of the policy, "
                "computed with a gradient from the same logits as logprobs"
            )
        # torch.where again: a NaN outside the mask would reach the gradient through 0 * nan.
        entropies = torch.where(batch.mask, batch.entropies, 0.0)
        return self.entropy_bonus.loss(entropies, token_weights=batch.token_weights)
