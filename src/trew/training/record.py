"""Computes the metrics row of a step from its rollouts, updates and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from ..objective import Objective, step_metrics
from ..objective.segments import has_signal
from ..objective.value import explained_variance
from ..runs.rollouts import Advantages
from ..types import Ending, Rollout, ScoredGroup, reduce_metrics
from . import guards
from .batch import advantages_by_uid
from .frozen import fresh_share, staleness
from .planning import Plan

if TYPE_CHECKING:
    from .attempt import Attempt


def update_row(attempt: Attempt, version: int) -> dict[str, Any]:
    """The metrics of a step's updates; ``version`` is the policy's after them. NaN: the value was not finite."""
    row: dict[str, Any] = {}
    if attempt.rollouts is not None:
        row = _learned(attempt, version) if attempt.rollouts.trained_on else {}
        row |= attempt.rollouts.facts
        row["advantage_share"] = _advantage_share(attempt)
    return row | (guards.bad_row(attempt.error) if attempt.error else {})


def _learned(attempt: Attempt, version: int) -> dict[str, Any]:
    rollouts, batch, updates = attempt.rollouts, attempt.batch, attempt.updates
    assert rollouts is not None
    assert batch is not None
    canary = attempt.canary
    row: dict[str, Any] = {
        "staleness": staleness(rollouts.trained_on, attempt.version),
        "canary_gap": canary.gap if canary else None,
        "fresh_share": fresh_share(rollouts.trained_on, attempt.version),
    }
    # (sum, count) pairs over all updates, divided once here: a mean of means would weigh small minibatches too much.
    every = [*updates, *attempt.critic_updates]
    sums = reduce_metrics([step_metrics(batch), *(update.metrics for update in every)])
    row |= {name: value / count for name, (value, count) in sums.items() if count}
    # There is no update of the policy while a critic warms up.
    row |= {
        "loss": sum(update.loss for update in updates) / max(len(updates), 1),
        "grad_norm": sum(update.grad_norm for update in updates) / max(len(updates), 1),
        "policy_version": version,
    }
    if batch.values is not None and batch.returns is not None:
        row["explained_variance"] = explained_variance(batch.values, returns=batch.returns, mask=batch.mask)
    if rollouts.baselines is not None:
        row |= _baseline_row(rollouts.baselines)
    # Of rollouts of older weights with a correction, one update measures it from the policy itself: 0, and no distance.
    if len(updates) < 2 and batch.old_logprobs is not batch.rollout_logprobs:
        row.pop("kl_old", None)
    # setdefault: a reference's KL has come with the update's metrics.
    # Without a reference model, "kl" is the distance that the updates moved, or the one between learner and sampler.
    row.setdefault("kl", row.get("kl_old", row.get("kl_rollout")))
    return row


def correction_row(attempt: Attempt, objective: Objective) -> dict[str, float]:
    """The share of a step's tokens beyond the limits of the objective's correction; empty without a correction."""
    share = None if attempt.batch is None else objective.corrected_share(attempt.batch)
    return {} if share is None else {"corrected_share": share}


def _baseline_row(baselines: Mapping[str, float]) -> dict[str, Any]:
    judged = [value for value in baselines.values() if value == value]  # NaN: the greedy answer has no reward
    return {
        "baseline": sum(judged) / len(judged) if judged else None,
        "baseline/none": 1 - len(judged) / len(baselines),
    }


def _advantage_share(attempt: Attempt) -> float:
    """The share of rollouts with an advantage; 0 if no group was kept."""
    # By rollout: whether any of its tokens has an advantage.
    own = [bool(values.any()) for group in _advantages(attempt).values() for values in group]
    return sum(own) / len(own) if own else 0.0


def _advantages(attempt: Attempt) -> dict[str, list[np.ndarray]]:
    """Per-token advantages of each rollout by prompt uid; empty if the step failed before computing them."""
    if attempt.rollouts is None or attempt.batch is None or attempt.batch.advantages is None:
        return {}
    return advantages_by_uid(attempt.rollouts, attempt.batch)


def advantages_of(attempt: Attempt) -> Advantages:
    """Per-token advantages of all sampled rollouts, group by group; None for those that were not trained on."""
    known = _advantages(attempt)
    groups = [scored.group for scored in attempt.rollouts.sampled] if attempt.rollouts else []
    # None for each rollout of a group that was dropped: it has no advantages.
    return [known.get(group.prompt.uid, [None] * len(group.rollouts)) for group in groups]


def rollout_row(plan: Plan, sampled: Sequence[ScoredGroup]) -> dict[str, Any]:
    """The metrics of all rollouts sampled in a step, dropped groups included: without those, filtering would distort
    reward and accuracy. Empty if the sampler failed. Lengths and entropies count sampled tokens only."""
    if not sampled:
        return {}
    if plan.config.demonstrates:
        return demonstration_row(plan, sampled)
    scores = [score for scored in sampled for score in scored.scores]
    rollouts = [rollout for scored in sampled for rollout in scored.group.rollouts]
    row = {
        "reward": _mean([score.value for score in scores]),
        "accuracy": _mean([plan.correct(score) for score in scores]),
        **_mean_entropy(rollouts),
        "completion_length": sum(map(len, rollouts)) / len(rollouts),
        # Not by status: that of an episode is "truncated" after its last turn, too, however short the replies were.
        "truncated_share": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "zero_signal_share": _mean([is_without_signal(scored) for scored in sampled]),
        "groups_sampled": len(sampled),
    }
    if plan.config.plays:
        row |= episode_row(rollouts)
    row |= set_row(plan, sampled)
    return row | {k: v / n for k, (v, n) in plan.rewards.summary(list(sampled)).items() if n}


def demonstration_row(plan: Plan, rows: Sequence[ScoredGroup]) -> dict[str, Any]:
    """The metrics of the rows of a step that nobody sampled or scored."""
    rollouts = [rollout for row in rows for rollout in row.group.rollouts]
    shares = {
        f"data/{name}/share": sum(row.group.prompt.data_set == name for row in rows) / len(rows)
        for name in plan.config.set_names
    }
    return {
        "completion_length": sum(map(len, rollouts)) / len(rollouts),
        "truncated_share": _mean([rollout.status == "truncated" for rollout in rollouts]),
        **shares,
    }


def of_demonstrations(row: Mapping[str, Any], *, prefers: bool) -> dict[str, Any]:
    """A step's row without what compares the policy with the one that sampled: there is none. ``prefers``: the rows are
    pairs of a chosen and a rejected answer."""
    kept = {name: value for name, value in row.items() if name not in _OF_SAMPLING and not name.startswith("clip_")}
    # Without a reference it would be the distance to the policy that sampled. Rejected answers are not what the policy
    # says either, and the mean of exp(log-ratio) over them is no KL.
    if kept.get("kl") is None or prefers:
        kept.pop("kl", None)
    return kept


_OF_SAMPLING = frozenset(
    {"staleness", "canary_gap", "fresh_share", "advantage_share", "kl_old", "kl_rollout", "ratio", "ratio_q01",
     "ratio_q50", "ratio_q99", "ess", "weight", "reward", "zero_signal_share", "unscored_share"}
)  # fmt: skip


def set_row(plan: Plan, sampled: Sequence[ScoredGroup]) -> dict[str, float]:
    """The metrics of each of several data sets: its share of the step's prompts, and the mean reward and the pass rate
    of its completions. A set without a prompt in the step has its share alone."""
    row: dict[str, float] = {}
    for name in plan.config.set_names:
        own = [scored for scored in sampled if scored.group.prompt.data_set == name]
        scores = [score for scored in own for score in scored.scores]
        row[f"data/{name}/share"] = len(own) / len(sampled)
        means = {"reward": _mean([s.value for s in scores]), "pass_rate": _mean([plan.correct(s) for s in scores])}
        row |= {f"data/{name}/{key}": value for key, value in means.items() if value is not None}
    return row


def episode_row(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The metrics of episodes: ``turns`` per episode, the share of observations among tokens behind the prompt, the
    share of episodes by how they ended where the environment did not end them, and what environments count."""
    played = [rollout for rollout in rollouts if len(rollout)]
    count = len(rollouts)
    tokens = sum(len(rollout.token_ids) for rollout in played)
    row = {
        "turns": sum(len(rollout.turns) for rollout in played) / count,
        # What is not sampled among the tokens behind the prompt is observation.
        "observation_share": 1 - sum(map(len, played)) / tokens if tokens else 0.0,
    }
    endings = Counter(rollout.ending for rollout in rollouts)
    row |= {f"environment/{name}": n / count for name, n in sorted(endings.items()) if name not in ("", "done")}
    sums: Counter[str] = Counter()
    for rollout in rollouts:
        for turn in rollout.turns:
            sums.update(turn.metrics)
    return row | {_of_environment(name): sums[name] / count for name in sorted(sums)}


def _of_environment(name: str) -> str:
    """Under which name a number of an environment is logged: never that of a share of endings, such as ``turns``."""
    if name in ("tool_calls", "tool_errors", "malformed"):
        return name
    return f"environment/own/{name}" if name in get_args(Ending) else f"environment/{name}"


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def is_without_signal(scored: ScoredGroup) -> bool:
    """Whether all rewards of a group are equal, which leaves nothing to learn from its comparison."""
    # As the objective sees them, in float32 and up to rounding: 0.1 + 0.2 is 0.3.
    known = torch.tensor([score.value for score in scored.scores if score.value is not None], dtype=torch.float32)
    one = torch.zeros(len(known), dtype=torch.int64)
    return not bool(has_signal(known.to(torch.float64), group_ids=one).any())


def _mean_entropy(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean over all sampled tokens (nats); empty if the engine does not report entropies, which the update then
    measures."""
    known = [values for rollout in rollouts if (values := rollout.entropies) is not None]
    if len(known) < len(rollouts):
        return {}
    return {"entropy": sum(float(values.sum()) for values in known) / max(sum(map(len, rollouts)), 1)}
