"""``trew report``: writes one HTML file about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def report(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], /, *, out: Path | None = None) -> int:
    """Write one self-contained HTML file about one or several runs: results, curves, samples, configuration.

    Args:
        runs: Run folders; several are drawn into the same charts.
        out: The file; default: report.html in the run folder, or in the working directory for several runs.
    """
    from ..errors import ConfigError
    from ..runs.report import write_report

    if not runs:
        raise ConfigError("report: give at least one run folder, for example: trew report runs/demo")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    if out is not None and out.is_dir():
        out = out / "report.html"
    print(write_report(runs, out))
    return 0
