"""The run's folder, and metrics for outside trackers."""

from . import trackers
from .redaction import redact
from .run import Run, problems
from .trackers import Trackers

__all__ = ["Run", "Trackers", "problems", "redact", "trackers"]
