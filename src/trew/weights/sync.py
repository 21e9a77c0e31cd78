"""How an engine gets the policy's new weights."""

from __future__ import annotations

from typing import Protocol

from ..learner import Policy
from ..rollout import Engine


class WeightSync(Protocol):
    """Publishes a policy's weights to an engine."""

    def publish(self, policy: Policy, engine: Engine) -> None:
        """Returns when requests submitted from now on are sampled from the weights of ``policy.version``, and
        ``engine.version`` says so. Publishing a version twice changes nothing."""
        ...


class InPlace:
    """Engine and policy hold the same tensors: only the version is passed on."""

    def publish(self, policy: Policy, engine: Engine) -> None:
        engine.version = policy.version
