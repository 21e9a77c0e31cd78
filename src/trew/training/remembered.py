"""Reads and validates the non-tensor state of a checkpoint, before anything is changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ResumeError
from ..runs.record import Record
from ..utils import shapes
from ..utils.shapes import ShapeError


@dataclass
class Progress:
    """The state of every training besides weights and optimizer; all of it is in every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None  # evaluation before training
    last_eval: dict[str, Any] | None = None
    evaluated: int = -1  # the last step whose weights were evaluated
    saved: int = -1  # the last step that has a checkpoint


@dataclass(frozen=True, slots=True)
class Shapes:
    """Dataclasses that the parts of a checkpoint's meta must match; a field without a default is required."""

    learner: type  # the snapshot's counters
    state: type[Progress]
    stateful: type  # one field for each of ``Program.stateful``
    evaluation: type  # the part of an evaluation that the state keeps


@dataclass(frozen=True, slots=True)
class Remembered:
    """The validated state that a training resumes from, besides tensors and counters."""

    state: Progress
    data: str  # fingerprint
    inputs: dict[str, str]  # digests of code and models, by name; empty where an earlier version wrote the checkpoint
    record: Record  # of the folder
    made_with: dict[str, str]  # versions of libraries; empty likewise


def read(kinds: Shapes, meta: dict[str, Any], step: int, folder: Path) -> Remembered:
    """The state in the checkpoint of ``step`` in ``folder``. Raises ResumeError if it is damaged."""
    # One dataclass for the whole meta, made from the parts' types, so that errors name the full path of a field.
    whole = dataclasses.make_dataclass(
        "Meta",
        [("learner", kinds.learner), ("state", kinds.state), ("data", str), ("remembered", kinds.stateful),
         ("record", Record), ("code", dict[str, str], dataclasses.field(default_factory=dict)),
         ("made_with", dict[str, str], dataclasses.field(default_factory=dict))],
    )  # fmt: skip
    try:
        found = shapes.read(whole, meta, "meta")
        if lacking := sorted({f.name for f in dataclasses.fields(kinds.state)} - set(meta["state"])):
            # State fields have defaults, but those describe a run that begins: a missing one must not become 0.
            raise ShapeError(f"meta.state: {lacking[0]!r} is missing")
        _check(found.state, kinds, step)
    except ShapeError as error:
        raise ResumeError(
            f"{folder}: state.json of step {step} is damaged or not of this version of trew: {error}. Put a backup "
            "there, continue with the version that wrote it, or start a new run with another out"
        ) from None
    return Remembered(found.state, found.data, found.code, found.record, found.made_with)


def _check(state: Progress, kinds: Shapes, step: int) -> None:
    """Raises ShapeError if counters are below their first values, later than the checkpoint, or of another step."""
    # The defaults are the first values, and counters only rise.
    for name, least in dataclasses.asdict(kinds.state()).items():
        value = getattr(state, name)
        if isinstance(least, (int, float)) and value < least:
            raise ShapeError(f"meta.state.{name}: got {value}, accepts {least} or more")
    if state.step != step:
        raise ShapeError(f"meta.state.step: got {state.step} in the checkpoint of step {step}")
    # A checkpoint cannot know of an event after its step.
    for name in ("evaluated", "saved", "best_step"):
        if getattr(state, name, -1) > step:
            raise ShapeError(f"meta.state.{name}: got {getattr(state, name)} in the checkpoint of step {step}")
    for name in ("before", "last_eval"):
        if (value := getattr(state, name)) is not None:
            shapes.read(kinds.evaluation, value, f"meta.state.{name}")
    if state.evaluated >= 0 and (state.before is None or state.last_eval is None):
        raise ShapeError("meta.state: an evaluation was made, but before or last_eval is null")
