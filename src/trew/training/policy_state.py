"""What a checkpoint of a policy's training remembers besides tensors, as types that it is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from ..diagnostics.health import Finding
from ..utils.shapes import Count
from .remembered import Progress, Shapes


@dataclass
class State(Progress):
    """What a policy's training must remember besides weights and optimizer."""

    tokens: int = 0  # completion tokens generated in training
    best_step: int = -1  # the step with the best evaluation after training began, the earliest of equals
    best_accuracy: float | None = None
    bad_steps: int = 0  # steps in a row that were not applied, for numbers that are not finite
    unjudged: int = 0  # steps in a row in which no completion had a value


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
    """Whatever counts or warns over several steps, by its name in ``PolicyProgram.stateful``."""

    engine: EngineState
    rollouts: RolloutsState
    monitors: MonitorsState
    rewards: RewardsState
    health: HealthState


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


SHAPES = Shapes(LearnerCounters, State, StatefulParts, _Evaluation)
