"""Finds the settings that would reduce a run's memory, and what each would save."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Config, validate
from ..learner.machine import machine_problems
from ..utils.toml import toml_value
from .run import Estimate, estimate

WORTH = 0.03
"""The share of the peak that a setting must save to be listed."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Settings that need less, and what the peak and a step's time would be with them."""

    settings: dict[str, Any]
    peak: int
    seconds: float
    fits: bool | None

    def __str__(self) -> str:
        return ", ".join(f"{key} = {toml_value(value)}" for key, value in self.settings.items())


def knobs(now: Estimate) -> list[Knob]:
    """Every single change that saves something, the harmless ones first.

    If none of them is enough, adds one knob that turns several together.
    """
    found = [
        knob for settings in _candidates(now) if (knob := _turned(now, settings)) and _saves(knob, now.memory.peak)
    ]
    if now.fits is False and len(found) > 1 and not any(knob.fits for knob in found):
        best = _together(now, found)
        found += [best] if best not in found else []
    return found


def _together(now: Estimate, single: Sequence[Knob]) -> Knob:
    """Turns one knob after another, as long as each saves more and the run does not fit."""
    # Greedy, not exhaustive: each combination is a full estimate, and there are too many of them.
    best = min(single, key=lambda knob: knob.peak)
    for one in single:
        # Where both change the same key, the better one's value wins.
        knob = _turned(now, one.settings | best.settings)
        if knob and _saves(knob, best.peak) and not best.fits:
            best = knob
    return best


def _saves(knob: Knob, peak: int) -> bool:
    return knob.peak < (1 - WORTH) * peak


def _turned(now: Estimate, settings: dict[str, Any]) -> Knob | None:
    config = changed(now.config, settings)
    if validate(config) or machine_problems(config, now.machine.device):
        return None
    # The rates measured before: a new measurement would add noise to the comparison, and time.
    then = estimate(
        config, machine=now.machine, objective=now.objective, prompt=now.prompt, held_out=now.held_out, rates=now.rates
    )
    return Knob(settings, then.memory.peak, sum(then.seconds.values()), then.fits)


def _candidates(now: Estimate) -> Iterator[dict[str, Any]]:
    """Settings that do not change the result, then those that do."""
    c = now.config
    if now.load.tokens > 256:
        # A quarter, as a power of two, and not below 256.
        yield {"learner.microbatch_tokens": 1 << max(round(math.log2(now.load.tokens)) - 2, 8)}
    rows = max(now.load.rows, now.load.evaluation.rows if now.load.evaluation else 0)
    if rows > 8:
        yield {"rollout.batch": rows // 4}
    if not c.learner.gradient_checkpointing:
        yield {"learner.gradient_checkpointing": True}
    yield {"learner.optimizer": "adamw-offload"}
    yield {"learner.optimizer": "adamw-8bit"}
    if c.learner.dtype == "float32":
        yield {"learner.dtype": "bfloat16"}
    # A base in fewer bytes needs adapters: where there are none yet, they come with it.
    lora: dict[str, Any] = {}
    if not c.lora.rank:
        lora = {"lora.rank": 16}
        # Keeps micro-batches as small as our kernels cut them; other code would fill the whole budget.
        if now.load.tokens < c.learner.microbatch_tokens:
            lora |= {"learner.microbatch_tokens": now.load.tokens}
        yield lora
    if c.lora.base == "float32":
        yield lora | {"lora.base": "bfloat16", "learner.dtype": "bfloat16"}
    if c.lora.base != "nf4":
        yield lora | {"lora.base": "nf4"}


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """
    >>> changed(Config(model="m"), {"lora.rank": 4}).lora.rank
    4
    """
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        inner = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: inner})
    return config
