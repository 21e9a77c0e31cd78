"""Summarises the rewards of a step as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..types import Metrics, Score, ScoredGroup, ScoreStatus
from .combine import FAILED


def summary(names: Sequence[str], scored: Sequence[ScoredGroup]) -> Metrics:
    """Returns metrics as (sum, count), so that ranks can add them up before dividing.

    ``reward`` is the mean value, ``reward/<name>`` the mean of a reward's numbers, and ``reward/<name>/seconds`` its
    time per completion that it applied to. ``reward/no_answer`` is a share of all completions. So are, where not zero,
    ``reward/<name>/<status>`` (not scored), ``reward/<name>/none`` (no number), ``reward/none`` (no value) and
    ``reward/none/<status>``. What has a reward's name is about the completions of its data sets."""
    scores = [score for group in scored for score in group.scores]
    n = float(len(scores))
    values = [score.value for score in scores if score.value is not None]
    statuses = Counter(score.status for score in scores)
    metrics: dict[str, tuple[float, float]] = {
        # Over known values only: a completion without a value is neither right nor wrong.
        "reward": (sum(values), float(len(values))),
        "reward/no_answer": (float(statuses["no_answer"]), n),
    }
    for name in names:
        metrics |= _of_reward(name, scores)
    # Left out where zero, so that a healthy run does not log a row of zeros.
    if len(values) < n:
        lacking = Counter(score.status for score in scores if score.value is None)
        metrics["reward/none"] = (n - len(values), n)
        metrics |= _shares("reward/none", lacking, n)
    return metrics


def _of_reward(name: str, scores: Sequence[Score]) -> Metrics:
    scores = [score for score in scores if score.statuses.get(name) != "other_set"]
    n = float(len(scores))
    parts = [part for score in scores if (part := score.parts.get(name)) is not None]
    statuses = Counter(status for score in scores if (status := score.statuses.get(name)))
    seconds = sum(score.part_seconds.get(name, 0.0) for score in scores)
    metrics = {
        # Over the reward's own numbers: completions that it did not judge must not pull its mean towards 0.
        f"reward/{name}": (sum(parts), float(len(parts))),
        f"reward/{name}/seconds": (seconds, n - statuses["not_applicable"]),
    }
    if len(parts) < n:
        metrics[f"reward/{name}/none"] = (n - len(parts), n)
    reported = {status: count for status, count in statuses.items() if status in ("no_answer", *FAILED)}
    return metrics | _shares(f"reward/{name}", reported, n)


def _shares(name: str, counts: Mapping[ScoreStatus, int], n: float) -> dict[str, tuple[float, float]]:
    return {f"{name}/{status}": (float(count), n) for status, count in sorted(counts.items())}
