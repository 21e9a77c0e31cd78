"""The run's folder, and metrics for outside trackers."""

from .run import Run, problems

__all__ = ["Run", "problems"]
