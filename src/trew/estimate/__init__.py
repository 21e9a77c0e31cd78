"""Estimates what a run needs before any weights are loaded: memory by part and phase, time, and what to change."""

from .advice import Knob, knobs
from .memory import Memory
from .run import Estimate, Machine, estimate
from .text import summary, table

__all__ = ["Estimate", "Knob", "Machine", "Memory", "estimate", "knobs", "summary", "table"]
