"""Brings numbered versions of the weights to vLLM servers, by a route that a subclass adds."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod

from ..errors import EngineError
from ..learner import Policy
from ..rollout import Engine
from ..rollout.vllm.engine import VllmEngine
from ..rollout.vllm.routes import Route
from ..rollout.vllm.update import Canary, Published
from .canary import canary_of, canary_samples


class Publisher(ABC):
    """Brings the policy's weights to a :class:`.VllmEngine`. ``dtype``: the type that the servers compute in, float32
    or bfloat16, which the weights are published in, too. ``vocabulary``, ``positions``: of the model."""

    def __init__(self, *, dtype: str, vocabulary: int, positions: int | None) -> None:
        self.dtype = dtype
        self.newest: Published | None = None
        self._samples = canary_samples(vocabulary, positions)
        # Another run's version 3 on a server that both use must not pass for this one's.
        self._tag = secrets.token_hex(4)

    def publish(self, policy: Policy, engine: Engine) -> None:
        """Takes the weights, and brings all servers to them. Raises StorageError, before any server is asked for
        anything, where there is no room; EngineError where no server has got the weights."""
        if not isinstance(engine, VllmEngine):
            raise EngineError(f"weights are published to vLLM servers, got {type(engine).__name__}")
        engine.update(self.write(policy, engine))

    def is_new(self, policy: Policy) -> bool:
        """Whether the policy's weights have not been taken yet."""
        return self.newest is None or self.newest.version != policy.version

    def write(self, policy: Policy, engine: VllmEngine) -> Published:
        """The first half of :meth:`publish`: the policy's version, taken where it is new. No server is asked for
        anything."""
        if self.newest is None or self.is_new(policy):
            route, canary = self._take(policy, engine)
            self.newest = Published(policy.version, f"{self._tag}.{policy.version}", route, canary)
        return self.newest

    def close(self) -> None:
        """Gives up all versions."""
        self.newest = None

    @abstractmethod
    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Route, Canary]:
        """A copy of the policy's weights that servers can load, then the canary: in this order, which other ranks
        follow."""

    def _canary(self, policy: Policy) -> Canary:
        return canary_of(policy, self._samples, self.dtype)
