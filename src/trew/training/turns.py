"""Learner and servers on the same GPUs, in turns: the one order in which both fit.

    generate -> servers sleep -> learner on the GPUs -> step -> weights into files -> learner into CPU memory
             -> servers wake for weights -> update -> wake for the KV cache -> canary -> generate

Every other order is a known way to run out of memory: a learner that is still there when the KV cache comes back,
servers that load weights in addition to their old ones. All ranks wait for one another where the GPUs change hands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import EngineError
from ..learner import Policy
from ..learner.placement import Placement
from ..rollout import Engine, RolloutSource, StepRollouts
from ..rollout.vllm.engine import VllmEngine
from ..weights import WeightSync
from ..weights.publisher import Publisher

Meet = Callable[[], Any]
"""Waits until all ranks are here."""


class TurnsOfSource:
    """Rollouts after which it is the learner's turn: puts servers to sleep once those of a step are complete.

    Without ``engine``, on a rank that gets its rollouts from another, they sleep already.
    """

    def __init__(self, source: RolloutSource, placement: Placement, engine: VllmEngine | None) -> None:
        self._source, self._placement, self._engine = source, placement, engine

    def next(self, step: int) -> StepRollouts:
        found = self._source.next(step)
        if found.trained_on:  # else there is nothing to learn, and the servers may go on
            if self._engine is not None:
                self._engine.sleep()
            self._placement.enter()
        return found

    def trained(self, step: int, version: int) -> None:
        self._source.trained(step, version)

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def load_state(self, state: Any) -> None:
        self._source.load_state(state)


class TurnsOfWeights:
    """Publishes weights, after which it is the servers' turn, whether the step succeeded or not.

    A new version is written while the learner has the GPUs: gathering shards and the canary need them.
    """

    def __init__(self, weights: Publisher, placement: Placement, meet: Meet) -> None:
        self._weights, self._placement, self._meet = weights, placement, meet

    def publish(self, policy: Policy, engine: Engine) -> None:
        if not isinstance(engine, VllmEngine):
            raise EngineError(f"weights are published to vLLM servers, got {type(engine).__name__}")
        # Unchanged weights are written already: the learner need not come back for them.
        if self._weights.is_new(policy):
            engine.sleep()
            self._meet()  # no rank enters before the servers sleep
            self._placement.enter()
        published = self._weights.write(policy, engine)
        self._placement.leave()
        self._meet()  # no server wakes before all ranks have left
        engine.update(published)


class TurnsOfRank:
    """The other ranks' part in :class:`TurnsOfWeights` of rank 0; ``gathering`` is their part in writing."""

    def __init__(self, gathering: WeightSync, placement: Placement, meet: Meet) -> None:
        self._gathering, self._placement, self._meet = gathering, placement, meet
        self._version: int | None = None

    def publish(self, policy: Policy, engine: Any) -> None:
        # Meets as often, and at the same places, as TurnsOfWeights.publish() does on rank 0.
        if policy.version != self._version:
            self._version = policy.version
            self._meet()
            self._placement.enter()
        self._gathering.publish(policy, engine)
        self._placement.leave()
        self._meet()
