"""Publishes weights to servers while requests are in flight."""

from __future__ import annotations

from ..learner import Policy
from ..rollout import Engine
from ..rollout.shared import SharedEngine
from ..rollout.vllm.engine import VllmEngine
from .files import PublishedFiles


class PublishedAlone:
    """Publishes files to an engine that several callers share. They wait while servers load a version, not while it is
    written; what they were asked for goes on, or is finished before (``cluster.in_flight``)."""

    def __init__(self, files: PublishedFiles, shared: SharedEngine[VllmEngine]) -> None:
        self._files, self._shared = files, shared

    def publish(self, policy: Policy, engine: Engine) -> None:
        """As :meth:`.PublishedFiles.publish`; ``engine`` is a view of the shared one."""
        published = self._files.write(policy, self._shared.engine)
        with self._shared.alone() as own:
            own.update(published)
