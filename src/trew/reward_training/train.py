"""Trains a reward model on preference pairs: the same run folder, checks, checkpoints and resume as ``trew train``.

Dropout is off and pairs are drawn by position, so that seed and data determine everything. Both texts of a pair are in
the same forward pass (:mod:`.packed`, :mod:`.plain`); a step's gradient does not depend on the split into passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from .. import runs
from ..models import loading
from ..runs import RunFolder
from ..runs.files import PRIVATE
from ..training.alone import alone
from ..training.changes import FREE_IN_A_RUN, check_changes, complete, unrecorded
from ..training.versions import arithmetic, versions
from ..utils.console import Display
from ..utils.signals import Interrupts
from .planning import plan
from .program import RewardProgram, build, figures
from .settings import RewardTraining, dumps


@alone()
def train_reward(
    settings: RewardTraining,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Display | None = None,
) -> dict[str, Any]:
    """Runs the whole training; returns the content of summary.json. ``out/final`` holds the model in Hugging Face
    layout.

    Raises ConfigError with every problem of settings, data and model before weights are loaded. ``resume`` continues
    from the newest complete checkpoint, under other settings only with ``allow_changes``; ``overwrite`` starts over in
    a used folder.
    """
    display = display or Display()
    # Before the folder is opened: what is refused leaves none behind.
    own = dataclasses.asdict(settings)
    ready = plan(settings, found=runs.problems(settings.out, resume=resume, overwrite=overwrite, settings=own))
    interrupts = Interrupts(grace_s=0)  # its steps are never left out, however long they take
    with RunFolder.open(settings.out, resume=resume, overwrite=overwrite) as folder, contextlib.ExitStack() as ending:
        if folder.resumed:
            for change in check_changes(folder.folder, dumps(settings), free=FREE_IN_A_RUN, allow=allow_changes):
                display.line(f"note: {change}")
            if (summary := complete(folder, ready.steps)) is not None:
                display.line(f"note: {folder.folder} is already complete: {ready.steps} of {ready.steps} steps")
                return summary
        else:
            folder.write_config(dumps(settings))
        program = build(ready, folder, display, interrupts)
        display.line(_headline(program))
        for note in (*ready.notes, *program.notes, *folder.messages):
            display.line(f"note: {note}")
        if folder.resumed:
            free = unrecorded(settings.learner.schedule)
            accepted = program.restore(allow_changes=allow_changes)
            # Only now: a refused resume must leave the run's settings unchanged.
            folder.go_on_with(dumps(settings), program.state.step, free=free, accepted=accepted)
        for note in (*ready.notes, *program.notes):
            folder.event(f"note: {note}", once=True)
        ending.enter_context(interrupts)  # from here on an interrupt has something to save; before, it just ends
        ending.enter_context(program.writer)
        with display.bar("training", ready.steps, done=program.state.step) as bar:
            for _ in program.steps():  # evaluates, saves and stops in between
                program.step(bar)
        # The model before the summary, which says that the run is complete.
        loading.export(program.model, ready.encoder.tokenizer, folder.final, mode=PRIVATE)
        summary = _summary(program)
        folder.write_summary(summary)
        for line in describe(summary):
            display.line(line)
        return summary


def _headline(program: RewardProgram) -> str:
    p = program.plan
    count = sum(parameter.numel() for parameter in program.parameters.values())
    device = p.device if p.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    return (
        f"reward model from {p.settings.model} ({count / 1e6:.3g} M parameters) on {device}; {len(p.train)} training "
        f"and {len(p.held)} held-out pairs, {p.steps} steps of {p.settings.learner.batch}"
    )


def describe(summary: dict[str, Any]) -> list[str]:
    """The metrics before and after a finished training, in two lines."""
    return [f"before: {figures(summary['before'])}", f"after:  {figures(summary['after'])}"]


def _summary(program: RewardProgram) -> dict[str, Any]:
    p, state = program.plan, program.state
    return {
        "task": "reward model", "model": p.settings.model, "seed": p.settings.seed, "steps": state.step,
        "seconds": state.seconds, "pairs": len(p.train), "before": state.before, "after": state.last_eval,
        "notes": [*p.notes, *program.notes], "versions": versions(),
        "device": p.device, "arithmetic": arithmetic(program.device, program.backend),
    }  # fmt: skip
