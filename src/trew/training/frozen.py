"""Log-probs that stay as they are through all updates on a step's rollouts, and whether the sampler has the policy's
weights.

The ratio r = exp(log pi - log pi_old) compares the policy with the one that sampled. It is 1, and nothing has to be
computed, only where every token was sampled from the current weights and one optimizer step is taken. Otherwise
``old_logprobs`` are given:

  several optimizer steps   the policy's before the first of them
  tokens of older weights   the sampler's, so that the ratio sees how far the policy has moved since; the policy's
                            before the first step where the objective corrects for the sampler by itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import EngineError, NumericsError
from ..learner import Policy
from ..objective import TokenBatch
from ..types import ScoredGroup, TrainingSample
from .batch import optimizer_steps
from .planning import Plan

CANARY = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which sampler and policy may differ at the same weights, mean over the tokens compared, by learner.dtype;
more than this is another policy, and not rounding."""

CANARY_TOKENS = 32
"""Tokens of a rollout that the canary compares, where nothing else needs them."""

ROUNDING = 1e-4
"""Nats by which two float32 computations of the same log-prob may differ."""


@dataclass(frozen=True, slots=True)
class Canary:
    """How far the sampler's log-probs are from the policy's at the same weights.

    ``differences`` (n,) are in nats, empty where nothing could be compared: no rollout is of the current weights alone,
    or (``cut``) the sampler's distribution was cut by top-p, top-k or min-p.
    """

    differences: Tensor
    cut: bool

    @property
    def gap(self) -> float | None:
        """The mean difference in nats; None where nothing was compared."""
        return float(self.differences.mean()) if len(self.differences) else None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A batch with its frozen log-probs; ``on_policy``: the ratio is exactly 1."""

    batch: TokenBatch
    canary: Canary
    on_policy: bool


def with_frozen_logprobs(
    plan: Plan, policy: Policy, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample], batch: TokenBatch
) -> Frozen:
    """The batch with ``old_logprobs`` and ``ref_logprobs`` where they are needed."""
    config, objective = plan.config, plan.objective
    stale = not all(_fresh(groups, policy.version))
    several = optimizer_steps(config, len(groups)) > 1
    # What acts on the reward is the KL of the policy that sampled.
    needed = several or stale or (objective.beta > 0 and objective.reference.place != "loss")
    canary = compare(plan, policy, groups, samples, batch, whole=needed and not stale)
    if needed:
        batch = batch.replace(old_logprobs=_old_logprobs(plan, policy, samples, batch, canary, stale=stale))
    if "ref_logprobs" in objective.needs:
        batch = batch.replace(ref_logprobs=policy.logprobs(samples, reference=True))
    return Frozen(batch, canary, on_policy=not (several or stale))


def _old_logprobs(
    plan: Plan, policy: Policy, samples: Sequence[TrainingSample], batch: TokenBatch, canary: Canary, *, stale: bool
) -> Tensor:
    """(N,) of the policy that the ratio compares with."""
    own = batch.rollout_logprobs
    if stale:
        corrected = any(correction.mismatch for correction in plan.objective.correction)
        return policy.logprobs(samples) if own is None or corrected else own
    # The sampler computed them already. Its own serve where they are the same numbers: of the same weights, of a
    # distribution of which nothing was cut away, in float32, and equal to the policy's on some rollouts.
    comparable = plan.config.kernels == "auto" and plan.config.learner.dtype == "float32"
    equal = len(canary.differences) > 0 and float(canary.differences.max()) <= ROUNDING
    return own if comparable and equal and own is not None else policy.logprobs(samples)


def compare(
    plan: Plan, policy: Policy, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample], batch: TokenBatch, *,
    whole: bool,
) -> Canary:  # fmt: skip
    """Compares the sampler's log-probs with the policy's on the first ``CANARY_TOKENS`` tokens of one rollout, of
    another group in each step; on rollouts of the current weights alone.

    ``whole``: on all tokens of the first two rollouts of the first and the last group, as more depends on it. Raises
    EngineError where the mean is beyond rounding: the sampler then has weights that the policy has not, and everything
    it says is of another policy.
    """
    own, fresh = batch.rollout_logprobs, _fresh(groups, policy.version)
    if own is None or not any(fresh):
        return Canary(torch.empty(0), cut=own is None)
    policy.verify(samples)
    few, most = _chosen(samples, fresh, policy.version, whole=whole)
    part = [TrainingSample(s.prompt_ids, s.token_ids[:most], s.group) for s in (samples[i] for i in few)]
    try:
        computed = policy.logprobs(part).split([len(s.token_ids) for s in part])
    except NumericsError as error:
        raise error.among(few) from None
    differences = []
    for i, values in zip(few, computed, strict=True):
        tokens = (batch.sequence_ids == i).nonzero().flatten()[: len(values)]
        differences.append((values - own[tokens])[batch.mask[tokens]].abs())
    found = torch.cat(differences)
    limit = CANARY[plan.config.learner.dtype]
    if len(found) and not float(found.mean()) <= limit:
        raise EngineError(
            f"the sampler's log-probs differ from the learner's by {float(found.mean()):.2g} nats on {len(found)} "
            f"tokens, both at policy version {policy.version}; accepted is {limit:g}. The sampler has other "
            "weights than the learner, or computes another distribution: nothing of this step was learned. Set "
            "kernels = 'plain' and linear = 'plain', and report it if that helps"
        )
    return Canary(found, cut=False)


def _chosen(
    samples: Sequence[TrainingSample], fresh: Sequence[bool], version: int, *, whole: bool
) -> tuple[list[int], int | None]:
    """Which samples the canary compares, and at most how many tokens of each; only fresh ones that have tokens."""
    usable = [i for i, sample in enumerate(samples) if fresh[i] and len(sample.token_ids)]
    groups = sorted({samples[i].group for i, ok in enumerate(fresh) if ok})
    chosen, each, most = sorted({groups[0], groups[-1]}), 2, None
    if not whole:
        chosen, each, most = [groups[version % len(groups)]], 1, CANARY_TOKENS
    return [i for g in chosen for i in [j for j in usable if samples[j].group == g][:each]], most


def _fresh(groups: Sequence[ScoredGroup], version: int) -> list[bool]:
    """Of each rollout, whether all its tokens were sampled from the weights of ``version``."""
    return [all(span.version == version for span in r.versions) for g in groups for r in g.group.rollouts]


def fresh_share(groups: Sequence[ScoredGroup], version: int) -> float:
    """The share of sampled tokens that are of the weights of ``version``; 1 where there are none."""
    spans = [span for g in groups for r in g.group.rollouts for span in r.versions]
    total = sum(span.end - span.start for span in spans)
    return sum(span.end - span.start for span in spans if span.version == version) / total if total else 1.0


def staleness(groups: Sequence[ScoredGroup], version: int) -> int:
    """By how many updates the weights of the oldest token are behind ``version``."""
    oldest = [r.oldest_version for g in groups for r in g.group.rollouts]
    return max((version - v for v in oldest if v is not None), default=0)
