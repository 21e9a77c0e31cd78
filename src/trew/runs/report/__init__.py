"""HTML reports and SVG charts of runs."""

from .html import render_report, write_report
from .read import RunData, load_run
from .svg import Series, line_chart, running_mean

__all__ = ["RunData", "Series", "line_chart", "load_run", "render_report", "running_mean", "write_report"]
