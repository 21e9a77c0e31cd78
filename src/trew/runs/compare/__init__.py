"""Compares finished runs: groups them by their settings, pairs them by seed, and refuses what cannot be compared."""

from .assemble import compare_runs
from .choices import Allow, Choices, Unfinished
from .page import write_page
from .result import ComparedRuns, to_json
from .text import describe

__all__ = ["Allow", "Choices", "ComparedRuns", "Unfinished", "compare_runs", "describe", "to_json", "write_page"]
