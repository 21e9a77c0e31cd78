"""How many steps a training on rows takes, and how often it passes over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..config import Assumed, Config
from ..data.order import prompt_order
from ..errors import ConfigError
from ..types import Prompt


def with_steps(config: Config, rows: Sequence[Prompt]) -> tuple[Config, list[str]]:
    """The configuration with the steps that its epochs make, and notes. Raises ConfigError if it has both."""
    own, count = config.sft, len(rows)
    if not own.epochs:
        return config, _passes(config, rows)
    steps = own.steps(count)
    if config.steps != steps and not isinstance(config.steps, Assumed):
        raise ConfigError(
            f"steps: got {config.steps}, but sft.epochs = {own.epochs:g} of {count} rows makes {steps}; leave steps "
            "out, or set sft.epochs = 0, so that steps counts"
        )
    made = dataclasses.replace(config, steps=steps)
    if config.learner.warmup_steps > made.optimizer_steps:
        raise ConfigError(
            f"learner.warmup_steps: got {config.learner.warmup_steps}, accepts at most the training's "
            f"{made.optimizer_steps} optimizer steps"
        )
    note = f"sft.epochs = {own.epochs:g}: {count} rows make {steps} steps of {own.batch}"
    return made, [note, *_passes(made, rows)]


def _passes(config: Config, rows: Sequence[Prompt]) -> list[str]:
    """Notes on rows that are learned otherwise than once in each epoch."""
    seen, order = config.steps * config.sft.batch, prompt_order(config, rows)
    if config.set_names:
        shares = zip(order.names, order.sizes, order.schedule.shares, strict=True)
        passes = ", ".join(f"{seen * float(share) / size:.3g} over {name!r}" for name, size, share in shares)
        return [f"weights, not sizes, decide how often the rows of a data set are learned; passes: {passes}"]
    if config.sft.batch > len(rows):
        return [f"a step has rows several times, since sft.batch is more than they are: {seen / len(rows):.3g} passes"]
    return []
