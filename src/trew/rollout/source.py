"""Where the loop's rollouts come from: the protocol that synchronous and asynchronous sources share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import ScoredGroup


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The scored groups of one step.

    ``kept`` are trained on; ``sampled`` are all that were generated, groups dropped by dynamic sampling included.
    ``baselines`` is the reward of the greedy answer by prompt uid, where the objective compares with it; NaN where
    there is none.
    """

    kept: tuple[ScoredGroup, ...]
    sampled: tuple[ScoredGroup, ...]
    baselines: Mapping[str, float] | None = None


class RolloutSource(Protocol):
    """Scored groups, step by step. What it must remember between steps is in ``state``, so that a resumed run gets
    the rollouts that an uninterrupted one would have got."""

    def next(self, step: int) -> StepRollouts:
        """The rollouts of ``step`` (counted from 1).

        Raises NumericsError when the model's output is not finite, EngineError when a prompt cannot be generated for,
        RewardError when a reward fails.
        """
        ...

    def trained(self, step: int, version: int) -> None:
        """The rollouts of ``step`` are used up, and the engine has the weights of policy version ``version``."""
        ...

    def state(self) -> dict[str, Any]:
        """What later rollouts depend on, as JSON can hold it."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where :meth:`state` was taken."""
        ...
