"""Our metrics in TRL's log, and TRL's own under their names where ours replace what computed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...objective import LossOutput

CLIP = {
    "clip_ratio/low_mean": ("clip_low_negative",),
    "clip_ratio/high_mean": ("clip_high_positive",),
    "clip_ratio/region_mean": ("clip_low_negative", "clip_high_positive"),
}
"""TRL's clip ratios, as sums of our metrics: tokens whose push is cut off below 1 for A < 0, and above 1 for A > 0."""

RAW = "raw/"
"""Marks names that are logged as they are, without ``trew/`` before them."""


def trl_metrics(trainer: Any, out: LossOutput) -> dict[str, tuple[float, float]]:
    """TRL's names for what the objective's output says: entropy, kl, and clip ratios."""
    metrics = out.metrics
    named = {RAW + "entropy": metrics["entropy"]}
    if trainer.beta:
        named[RAW + "kl"] = metrics["kl"]
    for name, parts in CLIP.items():
        named[RAW + name] = (sum(metrics[part][0] for part in parts), metrics[parts[0]][1])
    return named


def log_metrics(trainer: Any, metrics: Mapping[str, tuple[float, float]]) -> None:
    """Hands (sum, count) pairs to TRL's log; what has no count is not logged."""
    mode = "train" if trainer.model.training else "eval"
    for name, (total, count) in metrics.items():
        if count:
            shown = name.removeprefix(RAW) if name.startswith(RAW) else f"trew/{name}"
            trainer._metrics[mode][shown].append(total / count)
