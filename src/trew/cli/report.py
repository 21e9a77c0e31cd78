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
    from ..errors import ConfigError, StorageError
    from ..runs.report import write_report

    if not runs:
        raise ConfigError("report: give at least one run folder, for example: trew report runs/demo")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    if out is not None and out.is_dir():
        out = out / "report.html"
    try:
        print(write_report(runs, out))
    except StorageError as error:
        # Of a file that a run writes, the message says how to go on with the run.
        if out is not None or not isinstance(why := error.__cause__, OSError):
            raise
        raise StorageError(f"report.html: cannot be written: {why.strerror}; name another file with --out") from None
    return 0
