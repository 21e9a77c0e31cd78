"""The run's folder, and metrics for outside trackers."""

from ..redaction import redact
from . import trackers
from .run import Run, problems, read_config
from .trackers import Trackers

__all__ = ["Run", "Trackers", "problems", "read_config", "redact", "trackers"]
