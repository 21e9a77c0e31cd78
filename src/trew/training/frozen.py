"""Log-probs that are frozen during all updates on a step's rollouts, and the check that sampler and policy have the
same weights (the canary).

The ratio r = exp(log pi - log pi_old) compares the policy with the one that sampled. Only where every token was sampled
from the current weights and one optimizer step is taken, it is 1 and nothing has to be computed. Otherwise
``old_logprobs`` are set:

  several optimizer steps   to the policy's before the first of them
  tokens of older weights   to the sampler's, so that the ratio shows how far the policy has moved since; to the
                            policy's before the first step where the objective corrects for the sampler itself

Where advantages have the difference between the policy that sampled and a reference or a teacher, both log-probs come
from one computation: where the weights are equal, it is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import EngineError, NumericsError, ReplayError, TrewError
from ..learner import Policy
from ..objective import Objective, TokenBatch
from ..types import ScoredGroup, TrainingSample
from .batch import optimizer_steps
from .planning import Plan

CANARY = {
    "embedded": {"float32": 1e-3, "bfloat16": 0.25},
    "vllm": {"float32": 1e-3, "bfloat16": 0.05},
}
"""Largest mean difference in nats between sampler and policy at the same weights, by the engine that sampled
(cluster.rollout) and the narrower dtype of both.
A larger one means different weights or another distribution; rounding does not reach it."""

CANARY_TOKENS = 32
"""Tokens of a rollout that the canary compares if no other decision depends on it."""

ROUNDING = 1e-4
"""Largest difference in nats between two float32 computations of the same log-prob."""


@dataclass(frozen=True, slots=True)
class SamplerGap:
    """How far the sampler's log-probs are from the policy's at the same weights.

    ``differences`` (n,) are in nats, and empty if nothing could be compared: no rollout with tokens comes entirely from
    the current weights, or (``cut``) the sampler's distribution was cut by top-p, top-k or min-p.
    """

    differences: Tensor
    cut: bool

    @property
    def gap(self) -> float | None:
        """The mean difference in nats; None if nothing was compared."""
        return float(self.differences.mean()) if len(self.differences) else None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A batch with its frozen log-probs; ``on_policy``: the ratio is exactly 1."""

    batch: TokenBatch
    canary: SamplerGap
    on_policy: bool


def with_frozen_logprobs(
    plan: Plan, policy: Policy, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample], batch: TokenBatch
) -> Frozen:
    """The batch with ``old_logprobs``, ``ref_logprobs`` and ``teacher_logprobs``, if they are needed."""
    config, objective = plan.config, plan.objective
    if config.demonstrates:  # nobody has sampled them, so there is no policy to measure a ratio against
        if "ref_logprobs" in objective.needs:
            batch = batch.replace(ref_logprobs=policy.logprobs(samples, reference=True))
        return Frozen(batch, SamplerGap(torch.empty(0), cut=True), on_policy=True)
    # stale: some token was sampled from other weights than the current ones.
    stale = not all(_fresh(groups, policy.version))
    several = optimizer_steps(config, len(groups)) > 1
    needed = several or stale or _compared_in_advantages(objective)
    # Before anything is taken from the sampler: with other weights its log-probs are worth nothing.
    canary = compare(plan, policy, groups, samples, batch, whole=needed and not stale)
    batch, own = _measured(plan, policy, samples, batch)
    if "ref_logprobs" in objective.needs:
        batch = batch.replace(ref_logprobs=policy.logprobs(samples, reference=True))
    if needed:
        of_reference = _sampled_from(groups, policy.reference_version) if stale else None
        old = _old_logprobs(plan, policy, samples, batch, canary, of_reference=of_reference, known=own)
        batch = batch.replace(old_logprobs=old)
    if "teacher_logprobs" in objective.needs:
        batch = batch.replace(teacher_logprobs=policy.teacher_logprobs(samples))
    return Frozen(batch, canary, on_policy=not (several or stale))


def _measured(
    plan: Plan, policy: Policy, samples: Sequence[TrainingSample], batch: TokenBatch
) -> tuple[TokenBatch, torch.Tensor | None]:
    """The batch with what the objective needs of the policy's distributions, and the policy's log-probs at the
    temperature of the rollouts if a pass for it has given them."""
    # own has the temperature of the rollouts, as old_logprobs must; untempered log-probs have it at temperature 1
    # alone.
    own = None
    if "entropies" in plan.objective.needs and batch.entropies is None:
        untempered, entropies = policy.untempered(samples)
        batch = batch.replace(entropies=entropies)
        own = untempered if plan.config.rollout.temperature == 1 else None
    if "score_norms" in plan.objective.needs:
        own, norms = policy.score_norms(samples)
        batch = batch.replace(score_norms=norms)
    return batch, own


def _old_logprobs(
    plan: Plan, policy: Policy, samples: Sequence[TrainingSample], batch: TokenBatch, canary: SamplerGap, *,
    of_reference: Tensor | None, known: Tensor | None,
) -> Tensor:  # fmt: skip
    """Log-probs (N,) of the policy in the ratio's denominator. ``of_reference`` (N,): the tokens that were sampled from
    the weights of the reference; None where all are of the current ones. ``known``: the current policy's log-probs, if
    they are computed already."""
    own, stale = batch.rollout_logprobs, of_reference is not None
    # Log-probs that are compared in advantages must come from the same computation as the reference's or the teacher's:
    # where both agree, the advantage is 0, and a rounding error would be all that is left of it, which scaling by the
    # deviation of a group, and Adam, bring to full length.
    compared = _compared_in_advantages(plan.objective)
    corrected = any(correction.mismatch for correction in plan.objective.correction)
    # Without a correction the ratio itself must account for the policies that really sampled.
    if of_reference is not None and own is not None and not corrected:
        if compared and batch.ref_logprobs is not None:
            return torch.where(of_reference, batch.ref_logprobs, own)
        return own
    if compared:
        return policy.logprobs(samples)
    if known is not None:
        return known
    return own if own is not None and not stale and _are_equal(plan, canary) else policy.logprobs(samples)


def _compared_in_advantages(objective: Objective) -> bool:
    """Whether advantages have a difference between the policy that sampled and the reference or a teacher. It is
    computed once, and needs old_logprobs even for one on-policy step; a KL in the loss takes the current log-probs."""
    return objective.distillation > 0 or (objective.beta > 0 and objective.reference.place != "loss")


def _are_equal(plan: Plan, canary: SamplerGap) -> bool:
    """Whether the sampler's log-probs of fresh rollouts are the numbers that the policy would compute again."""
    # Same weights, an uncut distribution, float32, and equal to the policy's on the rollouts compared. Of another
    # process, a few rollouts that agree say too little about the others.
    config = plan.config
    if config.kernels != "auto" or config.learner.dtype != "float32" or plan.sampler.engine != "embedded":
        return False
    return len(canary.differences) > 0 and float(canary.differences.max()) <= ROUNDING


def compare(
    plan: Plan, policy: Policy, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample], batch: TokenBatch, *,
    whole: bool,
) -> SamplerGap:  # fmt: skip
    """Compares the sampler's log-probs with the policy's on the first ``CANARY_TOKENS`` tokens of one rollout that
    comes entirely from the current weights; the group changes with each step.

    ``whole``: on all tokens of the first two rollouts of the first and the last group, since the choice of
    ``old_logprobs`` depends on it. Raises EngineError if the mean is beyond rounding: the sampler then has other
    weights than the policy, and gradients from its log-probs would be wrong without any other symptom.
    """
    own = batch.rollout_logprobs
    # Episodes that failed in their openings have no tokens: they count as fresh, but there is nothing to compare.
    usable = [i for i, fresh in enumerate(_fresh(groups, policy.version)) if fresh and len(samples[i].token_ids)]
    if own is None or not usable:
        return SamplerGap(torch.empty(0), cut=own is None)
    policy.verify(samples)  # before the cut samples below, which would otherwise decide the execution path
    few, most = _chosen(samples, usable, policy.version, whole=whole)
    part = [samples[i].first(most) for i in few]
    try:
        computed = policy.logprobs(part).split([len(s.token_ids) for s in part])
    except NumericsError as error:
        raise error.among(few) from None
    differences = []
    for i, values in zip(few, computed, strict=True):
        # The places of sample i in the packed stream, as many as were computed.
        tokens = (batch.sequence_ids == i).nonzero().flatten()[: len(values)]
        # Masked tokens were not sampled: their log-prob in the batch is a 0 without meaning.
        differences.append((values - own[tokens])[batch.mask[tokens]].abs())
    found = torch.cat(differences)
    # ``not ... <=`` instead of ``>``: NaN must fail too.
    dtype = "bfloat16" if "bfloat16" in (plan.sampler.dtype, plan.config.learner.dtype) else "float32"
    limit = CANARY[plan.sampler.engine][dtype]
    if len(found) and not float(found.mean()) <= limit:
        raise _mismatch(plan, float(found.mean()), len(found), policy.version, limit)
    return SamplerGap(found, cut=False)


def _mismatch(plan: Plan, gap: float, tokens: int, version: int, limit: float) -> TrewError:
    """The error about a canary of ``gap`` nats. In a replay the sampler is out of reach, and only its log-probs speak
    of its weights."""
    run = plan.config.rollout.replay
    what = (
        f"the sampler's log-probs differ from the learner's by {gap:.2g} nats on {tokens} tokens, both at policy "
        f"version {version}; accepted is {limit:g}"
    )
    if run and not version:
        return ReplayError(
            f"rollout.replay: {what}. The rollouts in {run} were sampled from another model; give the model that run "
            "began with"
        )
    if run:
        return ReplayError(
            f"rollout.replay: {what}. This run has left the weights of {run}, as it may on another device or with "
            "other libraries; nothing of this step was learned. Replay it where it ran, fewer steps of it (steps), or "
            "with an objective that takes its completions for those of other weights, for example --set "
            'objective.correction="tis"'
        )
    return EngineError(
        f"{what}. The sampler has other weights than the learner, or computes another distribution: nothing of this "
        "step was learned. Set kernels = 'plain' and linear = 'plain', and report it if that helps"
    )


def _chosen(
    samples: Sequence[TrainingSample], usable: Sequence[int], version: int, *, whole: bool
) -> tuple[list[int], int | None]:
    """Those of the ``usable`` samples, at least one, that the canary compares, and the limit of tokens for each."""
    # One group per policy version in turn: over a run the canary visits them all, at the cost of one short forward.
    groups = sorted({samples[i].group for i in usable})
    chosen, each, most = sorted({groups[0], groups[-1]}), 2, None
    if not whole:
        chosen, each, most = [groups[version % len(groups)]], 1, CANARY_TOKENS
    # The first usable samples of each chosen group, as many as each says.
    return [i for g in chosen for i in [j for j in usable if samples[j].group == g][:each]], most


def _fresh(groups: Sequence[ScoredGroup], version: int) -> list[bool]:
    """For each rollout, whether all its tokens were sampled from the weights of ``version``."""
    return [all(span.version == version for span in r.versions) for g in groups for r in g.group.rollouts]


def _sampled_from(groups: Sequence[ScoredGroup], version: int | None) -> Tensor:
    """Which of the N tokens of all rollouts were sampled from the weights of ``version``, (N,) bool."""
    found = []
    for rollout in (r for g in groups for r in g.group.rollouts):
        found.append(torch.zeros(len(rollout.token_ids), dtype=torch.bool))
        for span in rollout.versions:
            found[-1][span.start : span.end] = span.version == version
    return torch.cat(found)


def fresh_share(groups: Sequence[ScoredGroup], version: int) -> float:
    """The share of sampled tokens that come from the weights of ``version``; 1 if there are none."""
    spans = [span for g in groups for r in g.group.rollouts for span in r.versions]
    total = sum(span.end - span.start for span in spans)
    return sum(span.end - span.start for span in spans if span.version == version) / total if total else 1.0


def staleness(groups: Sequence[ScoredGroup], version: int) -> int:
    """The number of updates between the weights of the oldest token and ``version``."""
    oldest = [r.oldest_version for g in groups for r in g.group.rollouts]
    return max((version - v for v in oldest if v is not None), default=0)
