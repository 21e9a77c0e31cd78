"""The run's folder, and metrics for outside trackers."""

from ..utils.secrets import redact
from . import trackers
from .folder import Run, problems, read_config
from .trackers import Trackers

__all__ = ["Run", "Trackers", "problems", "read_config", "redact", "trackers"]
