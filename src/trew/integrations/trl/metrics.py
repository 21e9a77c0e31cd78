"""Writes our metrics to TRL's log, and fills in TRL's own metrics that the replaced loss used to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...objective import LossOutput

CLIP = {
    "clip_ratio/low_mean": ("clip_low_negative",),
    "clip_ratio/high_mean": ("clip_high_positive",),
    "clip_ratio/region_mean": ("clip_low_negative", "clip_high_positive"),
}
"""TRL's clip ratios as sums of our metrics: tokens clipped below 1 where A < 0, and above 1 where A > 0."""

RAW = "raw/"
"""Prefix of names that are logged without ``trew/`` in front."""


def trl_metrics(trainer: Any, out: LossOutput) -> dict[str, tuple[float, float]]:
    """Returns entropy, KL and clip ratios of the objective's output under TRL's names."""
    metrics = out.metrics
    named = {RAW + "entropy": metrics["entropy"]}
    if trainer.beta:
        named[RAW + "kl"] = metrics["kl"]
    for name, parts in CLIP.items():
        # The parts are shares of the same tokens: the sums add up, the count stays.
        named[RAW + name] = (sum(metrics[part][0] for part in parts), metrics[parts[0]][1])
    return named


def log_metrics(trainer: Any, metrics: Mapping[str, tuple[float, float]]) -> None:
    """Appends means of (sum, count) pairs to TRL's log; a metric with count 0 is left out."""
    # Left out, not logged as 0: a zero would enter the mean that TRL takes over its logging interval.
    mode = "train" if trainer.model.training else "eval"
    for name, (total, count) in metrics.items():
        if count:
            shown = name.removeprefix(RAW) if name.startswith(RAW) else f"trew/{name}"
            trainer._metrics[mode][shown].append(total / count)
