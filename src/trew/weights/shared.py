"""Publishes weights to servers while requests are in flight."""

from __future__ import annotations

from ..learner import Policy
from ..rollout import Engine
from ..rollout.shared import SharedEngine
from ..rollout.vllm.engine import VllmEngine
from .publisher import Publisher


class PublishedAlone:
    """Publishes versions to an engine that several callers share. They wait while servers load a version, not while it
    is copied; their requests continue, or are finished before (``cluster.in_flight``)."""

    def __init__(self, weights: Publisher, shared: SharedEngine[VllmEngine]) -> None:
        self._weights, self._shared = weights, shared

    def publish(self, policy: Policy, engine: Engine) -> None:
        """As :meth:`.Publisher.publish`; ``engine`` is a view of the shared one."""
        # Before the lock is taken: callers go on while the weights are copied.
        published = self._weights.write(policy, self._shared.engine)
        with self._shared.alone() as own:
            own.update(published)
