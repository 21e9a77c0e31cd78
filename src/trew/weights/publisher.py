"""Publishes numbered versions of the weights to vLLM servers, by a route that a subclass adds."""

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
from .places import WeightFolder


class Publisher(ABC):
    """Publishes the policy's weights to a :class:`.VllmEngine`. ``dtype``: that of the servers and of the published
    weights, float32 or bfloat16. ``vocabulary``, ``positions``: the model's."""

    def __init__(self, *, dtype: str, vocabulary: int, positions: int | None) -> None:
        self.dtype = dtype
        self.newest: Published | None = None
        self._samples = canary_samples(vocabulary, positions)
        # Another run's version 3 on a server that both use must not pass for this one's.
        self._tag = secrets.token_hex(4)

    def publish(self, policy: Policy, engine: Engine) -> None:
        """Copies the weights and updates all servers to them. Raises StorageError, before any server is called, if
        there is no room; EngineError if no server has the weights."""
        if not isinstance(engine, VllmEngine):
            raise EngineError(f"weights are published to vLLM servers, got {type(engine).__name__}")
        engine.update(self.write(policy, engine))

    def is_new(self, policy: Policy) -> bool:
        """Whether the policy's weights have not been copied yet."""
        return self.newest is None or self.newest.version != policy.version

    def write(self, policy: Policy, engine: VllmEngine) -> Published:
        """Does the first half of :meth:`publish`: copies the policy's weights if they are new. Pauses no server."""
        if self.newest is None or self.is_new(policy):
            route, canary = self._take(policy, engine)
            self.newest = Published(policy.version, f"{self._tag}.{policy.version}", route, canary)
        return self.newest

    def close(self) -> None:
        """Removes all versions."""
        self.newest = None

    @abstractmethod
    def _take(self, policy: Policy, engine: VllmEngine) -> tuple[Route, Canary]:
        """Copies the policy's weights for servers, then computes the canary: other ranks follow this order."""

    def _canary(self, policy: Policy) -> Canary:
        return canary_of(policy, self._samples, self.dtype)


class FolderPublisher(Publisher):
    """Publishes into a folder, made for the first version and removed at the end. ``size``: bytes of a version
    (:func:`.version_size`)."""

    def __init__(self, *, dtype: str, size: int, vocabulary: int, positions: int | None) -> None:
        super().__init__(dtype=dtype, vocabulary=vocabulary, positions=positions)
        self.size = size
        # None before the first version: where the servers run is known only from the engine.
        self._place: WeightFolder | None = None

    def close(self) -> None:
        """Removes all versions. Servers let go of theirs at the end of each update."""
        super().close()
        if self._place is not None:
            self._place.close()
            self._place = None

    def place(self, engine: VllmEngine) -> WeightFolder:
        """The folder of all versions."""
        if self._place is None:
            self._place = self._make_place(engine)
        return self._place

    @abstractmethod
    def _make_place(self, engine: VllmEngine) -> WeightFolder:
        """Makes the folder where the servers of ``engine`` can read it."""
