"""Where the training loop's rollouts come from: the protocol that synchronous and asynchronous sources share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..types import ScoredGroup


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The scored groups of one step.

    ``trained_on`` are the groups of the step; ``sampled`` are all that were generated, including groups that dynamic
    sampling dropped. ``baselines`` is the reward of the greedy answer by prompt uid, where the objective compares with
    it; NaN if there is none. ``facts`` are more metrics of the step.
    """

    trained_on: tuple[ScoredGroup, ...]
    sampled: tuple[ScoredGroup, ...]
    baselines: Mapping[str, float] | None = None
    facts: Mapping[str, float] = field(default_factory=dict)


class RolloutSource(Protocol):
    """Supplies scored groups, step by step. ``state`` holds everything it remembers between steps, so that a resumed
    run gets the same rollouts as an uninterrupted one."""

    def next(self, step: int) -> StepRollouts:
        """Returns the rollouts of ``step`` (counted from 1).

        Raises NumericsError when the model's output is not finite, EngineError when a prompt is invalid for the
        engine, RewardError when a reward fails.
        """
        ...

    def trained(self, step: int, version: int) -> None:
        """Called after ``step`` was trained on and the engine has the weights of policy version ``version``."""
        ...

    def state(self) -> dict[str, Any]:
        """What later rollouts depend on, as JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        ...
