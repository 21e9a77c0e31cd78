"""The run's folder, and metrics for outside trackers."""

from .redact import redact
from .run import Run, problems
from .trackers import Trackers

__all__ = ["Run", "Trackers", "problems", "redact"]
