"""Sends the policy's new weights to an engine."""

from __future__ import annotations

from typing import Protocol

from ..learner import Policy
from ..rollout import Engine


class WeightSync(Protocol):
    """Publishes a policy's weights to an engine."""

    def publish(self, policy: Policy, engine: Engine) -> None:
        """Blocks until requests submitted afterwards are sampled from the weights of ``policy.version``, and
        ``engine.version`` equals it. Publishing a version twice changes nothing."""
        ...


class InPlace:
    """For an engine that shares the policy's tensors: passes on only the version."""

    def publish(self, policy: Policy, engine: Engine) -> None:
        engine.version = policy.version
