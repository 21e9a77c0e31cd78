"""What a step says about itself: the figures of its rollouts and of its advantages, for its row of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..types import Rollout, ScoredGroup
from .job import Job


def advantage_share(advantages: Mapping[str, Sequence[np.ndarray]]) -> float:
    """The share of completions with an advantage, 0 where no group was kept; as :func:`update` returns them."""
    own = [bool(a.any()) for group in advantages.values() for a in group]
    return sum(own) / len(own) if own else 0.0


def rollout_row(job: Job, seen: list[ScoredGroup]) -> dict[str, Any]:
    """What the rollouts of a step say, over everything that was sampled, dropped groups included; nothing where the
    sampler failed."""
    if not seen:
        return {}
    scores = [s.value for g in seen for s in g.scores if s.value is not None]
    correct = [c for g in seen for s in g.scores if (c := job.plan.correct(s)) is not None]
    completions = [c for g in seen for c in g.group.rollouts]
    tokens = sum(len(c) for c in completions)
    row = {
        "reward": float(np.mean(scores)) if scores else None,
        "accuracy": float(np.mean(correct)) if correct else None,
        "entropy": mean_entropy(completions),
        "completion_length": tokens / len(completions),
        "truncated_share": float(np.mean([c.finish_reason == "length" for c in completions])),
        "zero_signal_share": float(
            np.mean([len({s.value for s in g.scores if s.value is not None}) < 2 for g in seen])
        ),
        "groups_sampled": len(seen),
    }
    return row | {k: v / n for k, (v, n) in job.plan.rewards.summary(seen).items() if n}


def mean_entropy(rollouts: Sequence[Rollout]) -> float | None:
    """Mean over all sampled tokens (nats); None where the engine does not report entropies."""
    known = [rollout.entropies for rollout in rollouts]
    if any(values is None for values in known):
        return None
    return sum(float(values.sum()) for values in known if values is not None) / max(sum(map(len, rollouts)), 1)
