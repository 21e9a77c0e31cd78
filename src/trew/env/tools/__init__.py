"""Tools: functions that the policy calls, the formats in which replies contain calls, and the tool loop."""

from .builtin import ToolError
from .formats import Parsed, ToolFormat
from .loading import load
from .loop import ToolLoop
from .recognise import recognised
from .schema import tool_of

__all__ = ["Parsed", "ToolError", "ToolFormat", "ToolLoop", "load", "recognised", "tool_of"]
