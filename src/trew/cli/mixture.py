"""Describes how a run mixes its data sets, and draws prompts by their pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import Config

if TYPE_CHECKING:
    from ..types import Prompt


def mixture_lines(config: Config, train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> list[str]:
    """One line per data set, of several, on its share of the run's prompts, and one on the curriculum."""
    from ..data import by_set, prompt_order

    lines = []
    order = prompt_order(config, train)
    held = by_set(evaluation, config.set_names) if config.set_names else {}
    steps = config.steps
    if config.demonstrates and config.sft.epochs:  # they decide the steps, also where nothing was planned yet
        steps = config.sft.steps(len(train))
    draws = steps * config.step_prompts
    # The only set of a recipe without [[data]] has no name, and no line.
    for name, size, share in zip(order.names, order.sizes, order.schedule.shares, strict=True):
        if name:
            epochs = float(draws * share / size)
            lines.append(
                f"data set {name}: {float(share):.1%} of the prompts, {float(draws * share):.0f} of {draws} without "
                f"refills; {size} training prompts ({epochs:.2f} epochs), {len(held[name])} held out"
            )
    own = config.curriculum
    if own.share:
        others = f"after {1 / own.floor:g} times as long" if own.floor else "never"
        lines.append(
            f"curriculum: {own.share:.0%} of the prompts of each set are drawn by their pass rates, where known: "
            f"those from {own.low:g} to {own.high:g} in turn, others {others}"
        )
    return lines
