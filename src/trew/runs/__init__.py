"""The run folder, and metrics for external trackers."""

from ..utils.secrets import redact
from . import trackers
from .config_file import read_config, redact_config
from .folder import RunFolder, problems
from .trackers import Trackers

__all__ = ["RunFolder", "Trackers", "problems", "read_config", "redact", "redact_config", "trackers"]
