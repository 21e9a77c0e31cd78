"""What a checkpoint remembers besides tensors, as types: everything is read and checked before anything is changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ..diagnostics.health import Finding
from ..errors import ResumeError
from ..runs.record import Record
from ..utils import shapes
from ..utils.shapes import Count, ShapeError
from .parts import State


@dataclass(frozen=True, slots=True)
class LearnerCounters:
    """What ``Learner.state`` gives beside tensors."""

    policy_version: Count
    steps: Count
    optimizer: str
    base: str
    entropy_coefficient: float


@dataclass(frozen=True, slots=True)
class EngineState:
    """As ``TorchEngine.state`` gives it."""

    refused: bool
    version: Count


@dataclass(frozen=True, slots=True)
class RolloutsState:
    """As ``SyncRollouts.state`` gives it."""

    position: Count


@dataclass(frozen=True, slots=True)
class MonitorsState:
    """As ``Monitors.state`` gives it; sums of squares of large rewards may be infinite."""

    last: list[dict[str, tuple[Real, Real]]]
    first: list[dict[str, tuple[Real, Real]]]
    told: dict[str, int]


@dataclass(frozen=True, slots=True)
class RewardsState:
    """As ``RewardSet.state`` gives it."""

    told: dict[str, Count]
    waiting: list[str]


@dataclass(frozen=True, slots=True)
class HealthState:
    """As ``Health.state`` gives it."""

    first: list[dict[str, float]]
    last: list[dict[str, float]]
    told: dict[str, int]
    found: list[Finding]


@dataclass(frozen=True, slots=True)
class StatefulParts:
    """Whatever counts or warns over several steps, by its name in ``Parts.stateful``."""

    engine: EngineState
    rollouts: RolloutsState
    monitors: MonitorsState
    rewards: RewardsState
    health: HealthState


@dataclass(frozen=True, slots=True)
class Remembered:
    """All of a checkpoint's meta."""

    learner: LearnerCounters
    state: State
    data: str
    remembered: StatefulParts
    record: Record


@dataclass(frozen=True, slots=True)
class _Interval:
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """As ``EvalResult.to_json`` gives it."""

    accuracy: _Interval
    n: Count
    samples: Count
    left_out: Count
    left_out_samples: Count
    pass_at: dict[str, _Interval]
    mean_length: float | None
    truncated_share: float | None
    rewards: dict[str, Real | None]
    seconds: float
    tokens_per_second: float
    prompt_accuracy: dict[str, float]


def read(meta: dict[str, Any], step: int, folder: Path) -> Remembered:
    """What the checkpoint of ``step`` in ``folder`` remembers; raises ResumeError where it cannot be that."""
    try:
        found = shapes.read(Remembered, meta, "meta")
        if lacking := sorted({f.name for f in dataclasses.fields(State)} - set(meta["state"])):
            raise ShapeError(f"meta.state: {lacking[0]!r} is missing")  # its default is of a run that begins
        _check(found.state, step)
    except ShapeError as error:
        raise ResumeError(
            f"{folder}: state.json of step {step} is damaged or not of this version of trew: {error}. Put a backup "
            "there, continue with the version that wrote it, or start a new run with another out"
        ) from None
    return found


def _check(state: State, step: int) -> None:
    """Raises ShapeError where counters are below their first values, later than the checkpoint, or of another step."""
    for name, least in dataclasses.asdict(State()).items():
        value = getattr(state, name)
        if isinstance(least, (int, float)) and value < least:
            raise ShapeError(f"meta.state.{name}: got {value}, accepts {least} or more")
    if state.step != step:
        raise ShapeError(f"meta.state.step: got {state.step} in the checkpoint of step {step}")
    for name in ("evaluated", "saved", "best_step"):
        if getattr(state, name) > step:
            raise ShapeError(f"meta.state.{name}: got {getattr(state, name)} in the checkpoint of step {step}")
    for name in ("before", "last_eval"):
        if (value := getattr(state, name)) is not None:
            shapes.read(_Evaluation, value, f"meta.state.{name}")
    if state.evaluated >= 0 and (state.before is None or state.last_eval is None):
        raise ShapeError("meta.state: an evaluation was made, but before or last_eval is null")
