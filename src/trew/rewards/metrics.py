"""Rewards of a step in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..types import Metrics, Score, ScoredGroup
from .combine import FAILED


def summary(names: Sequence[str], scored: Sequence[ScoredGroup]) -> Metrics:
    """Metrics as (sum, count): ``reward`` over all values, ``reward/<name>`` over each reward's own numbers and
    ``reward/<name>/seconds`` per completion it was asked for, ``reward/no_answer`` as a share of all completions;
    and, where there were any, as shares of all completions too: ``reward/<name>/<status>`` for what was not scored,
    ``reward/<name>/none`` (no number), ``reward/none`` (no value) and ``reward/none/<status>``."""
    scores = [score for group in scored for score in group.scores]
    n = float(len(scores))
    values = [score.value for score in scores if score.value is not None]
    statuses = Counter(score.status for score in scores)
    metrics: dict[str, tuple[float, float]] = {
        "reward": (sum(values), float(len(values))),
        "reward/no_answer": (float(statuses["no_answer"]), n),
    }
    for name in names:
        metrics |= _of_reward(name, scores)
    if len(values) < n:
        lacking = Counter(score.status for score in scores if score.value is None)
        metrics["reward/none"] = (n - len(values), n)
        metrics |= _shares("reward/none", lacking, n)
    return metrics


def _of_reward(name: str, scores: Sequence[Score]) -> Metrics:
    n = float(len(scores))
    parts = [part for score in scores if (part := score.parts.get(name)) is not None]
    statuses = Counter(status for score in scores if (status := score.statuses.get(name)))
    seconds = sum(score.part_seconds.get(name, 0.0) for score in scores)
    metrics = {
        f"reward/{name}": (sum(parts), float(len(parts))),
        f"reward/{name}/seconds": (seconds, n - statuses["not_applicable"]),
    }
    if len(parts) < n:
        metrics[f"reward/{name}/none"] = (n - len(parts), n)
    told = {status: count for status, count in statuses.items() if status in ("no_answer", *FAILED)}
    return metrics | _shares(f"reward/{name}", told, n)


def _shares(name: str, counts: Mapping[str, int], n: float) -> dict[str, tuple[float, float]]:
    return {f"{name}/{status}": (float(count), n) for status, count in sorted(counts.items())}
