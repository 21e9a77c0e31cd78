"""The non-tensor state in a checkpoint of a policy's training, as types that it is validated against."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real

from ..diagnostics.health import HealthWarning
from ..utils.shapes import Count, Share
from .remembered import Progress, Shapes


@dataclass
class PolicyState(Progress):
    """The state of a policy's training besides weights and optimizer."""

    tokens: int = 0  # completion tokens generated in training
    best_step: int = -1  # the step with the best evaluation after training began; the earliest of equals
    best_accuracy: float | None = None
    bad_steps: int = 0  # consecutive steps not applied because of non-finite numbers
    unjudged: int = 0  # consecutive steps in which no completion had a value


@dataclass(frozen=True, slots=True)
class LearnerCounters:
    """The counters that ``Learner.state`` returns."""

    policy_version: Count
    steps: Count
    optimizer: str
    base: str
    entropy_coefficient: float
    critic_steps: Count = 0
    reference_version: Count | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state that an engine returns; ``refused`` is of the embedded one."""

    version: Count
    refused: bool = False


@dataclass(frozen=True, slots=True)
class RolloutsState:
    """The state that ``SyncRollouts``, ``StaleRollouts``, ``AsyncRollouts`` and ``ReplayRollouts`` return; ``turns``
    and ``rates`` are those of a ``Curriculum``."""

    position: Count
    sampled: Count = 0
    ledger: Count = 0
    ahead: str = ""
    replayed: str = ""
    turns: list[Count] = field(default_factory=list)
    rates: dict[str, tuple[Share, Share, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MonitorsState:
    """The state that ``Monitors.state`` returns; sums of squares of large rewards may be infinite."""

    last: list[dict[str, tuple[Real, Real]]]
    first: list[dict[str, tuple[Real, Real]]]
    told: dict[str, int]


@dataclass(frozen=True, slots=True)
class RewardsState:
    """The state that ``RewardSet.state`` returns."""

    told: dict[str, Count]
    waiting: list[str]


@dataclass(frozen=True, slots=True)
class HealthState:
    """The state that ``Health.state`` returns."""

    first: list[dict[str, float]]
    last: list[dict[str, float]]
    told: dict[str, int]
    found: list[HealthWarning]


@dataclass(frozen=True, slots=True)
class StatefulParts:
    """The states of everything that counts or warns over several steps, named as in ``PolicyProgram.stateful``."""

    engine: EngineState
    rollouts: RolloutsState
    monitors: MonitorsState
    rewards: RewardsState
    health: HealthState


@dataclass(frozen=True, slots=True)
class _SavedInterval:
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class _SavedSet:
    accuracy: _SavedInterval
    n: Count


@dataclass(frozen=True, slots=True)
class _SavedEvaluation:
    """The result that ``EvalResult.to_json`` returns."""

    accuracy: _SavedInterval
    n: Count
    samples: Count
    left_out: Count
    left_out_samples: Count
    pass_at: dict[str, _SavedInterval]
    mean_length: float | None
    truncated_share: float | None
    rewards: dict[str, Real | None]
    seconds: float
    tokens_per_second: float
    prompt_accuracy: dict[str, float]
    sets: dict[str, _SavedSet] = field(default_factory=dict)


SHAPES = Shapes(LearnerCounters, PolicyState, StatefulParts, _SavedEvaluation)
