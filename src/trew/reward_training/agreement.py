"""Agreement of scores with preferences: accuracy within pairs and AUC over all texts, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..eval.statistics import LEVEL, Interval, cluster_interval, wilson

RESAMPLES = 1000


def pair_accuracy(chosen: ArrayLike, *, rejected: ArrayLike) -> float:
    """The share of pairs in which the chosen text scores higher; equal scores count one half.

    >>> pair_accuracy([1.0, 0.0, 2.0], rejected=[0.0, 0.0, 3.0])
    0.5
    """
    difference = np.asarray(chosen, dtype=np.float64) - np.asarray(rejected, dtype=np.float64)
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def auc(good: ArrayLike, *, bad: ArrayLike) -> float:
    """The probability that a good text scores higher than a bad one, across prompts; equal scores count one half.

    Area under the ROC curve, by ranks (Mann and Whitney 1947). NaN where either side is empty.

    >>> auc([3.0, 1.0], bad=[0.0, 2.0])
    0.75
    """
    from scipy.stats import rankdata

    good, bad = np.asarray(good, dtype=np.float64), np.asarray(bad, dtype=np.float64)
    if not good.size or not bad.size:
        return float("nan")
    # Ties get their mean rank, which is what counts them one half.
    ranks = rankdata(np.concatenate([good, bad]))
    # U = R - n (n + 1) / 2, with R the sum of the good texts' ranks; AUC = U / (n m).
    return float((ranks[: good.size].sum() - good.size * (good.size + 1) / 2) / (good.size * bad.size))


def agreement(
    chosen: Sequence[float], *, rejected: Sequence[float], clusters: Sequence[str], seed: int = 0, level: float = LEVEL
) -> dict[str, Any]:
    """Accuracy and AUC of the scores of pairs, each with its interval over prompts.

    Pairs of one prompt (equal ``clusters``) are not independent. Accuracy is the mean over prompts of
    :func:`pair_accuracy`, with the score interval of ``eval.statistics``. AUC has a percentile bootstrap interval over
    whole prompts, deterministic for a ``seed``; where all draws agree (every good text above every bad one), the score
    interval for as many prompts. A text in several pairs counts once per pair in the AUC.
    """
    good, bad = np.asarray(chosen, dtype=np.float64), np.asarray(rejected, dtype=np.float64)
    names = list(dict.fromkeys(clusters))
    number = {name: i for i, name in enumerate(names)}
    # of[i] is the number of pair i's prompt, members[j] the positions of prompt j's pairs.
    of = np.array([number[name] for name in clusters], dtype=np.int64)
    members = [np.flatnonzero(of == i) for i in range(len(names))]
    by_prompt = [pair_accuracy(good[at], rejected=bad[at]) for at in members]
    # The most pairs of a prompt: it only limits the effective number of observations from above.
    accuracy = cluster_interval(by_prompt, samples=max(map(len, members)), level=level)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        # Prompts are drawn with replacement, each with all of its pairs.
        at = np.concatenate([members[i] for i in rng.integers(0, len(names), len(names))])
        draws.append(auc(good[at], bad=bad[at]))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    area = auc(good, bad=bad)
    if low == high:  # a bootstrap of identical values has width 0, which would claim certainty
        _, low, high = wilson(area * len(names), len(names), level=level)
    area = Interval(area, float(low), float(high))
    return {
        "pairs": len(good), "prompts": len(names), "accuracy": accuracy._asdict(), "auc": area._asdict(),
        "margin": float((good - bad).mean()), "mean_score": float(np.concatenate([good, bad]).mean()),
    }  # fmt: skip
