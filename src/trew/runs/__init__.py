"""The run folder, and metrics for external trackers."""

from ..utils.secrets import redact
from . import trackers
from .config_file import read_config, redact_config
from .folder import RunFolder
from .layout import Layout, problems
from .trackers import Trackers

__all__ = ["Layout", "RunFolder", "Trackers", "problems", "read_config", "redact", "redact_config", "trackers"]
