"""``trew study``: trains every cell of a design with every seed, and reports as it goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro


def study(
    design: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    out: Path | None = None,
    hours: float | None = None,
    jobs: int = 1,
    only: str = "",
    earlier: tuple[Path, ...] = (),
    status: bool = False,
    dry_run: bool = False,
) -> int:
    """Conduct a study: every algorithm on every task in every regime, with the same seeds, and a report with intervals.

    Checks every cell before the first run starts. Chooses the learning rate of each cell on seeds that are never
    reported, then trains the reported seeds, one seed of all cells after the other, so that the study is balanced
    whenever it stops. The same command goes on where it stopped, after Ctrl-C or kill -9. docs/study.md has the
    design's keys and what is reported.

    Args:
        design: The study, a TOML file; studies/ has some.
        out: Folder of the study; default runs/NAME, by the name in the file.
        hours: Start no more runs after so many hours.
        jobs: Runs at once, each on one thread.
        only: Cells to run: names of a regime, a task or an algorithm, with / between them, as off/sums.
        earlier: Results of parts that were run elsewhere (results.json): their runs count as done where settings and
            starting weights are the same. The study's folder keeps them.
        status: Print how far the study is, and run nothing.
        dry_run: Check every cell, print the number of runs, and run nothing.
    """
    from ..errors import ConfigError
    from ..study.conduct import Conduct
    from ..study.design import load
    from ..study.design import only as chosen
    from ..study.report import describe
    from ..utils.console import Display

    problems = []
    if jobs < 1:
        problems.append(f"--jobs: got {jobs}, accepts a whole number of at least 1")
    if hours is not None and not 0 < hours < 10_000:
        problems.append(f"--hours: got {hours}, accepts a number above 0")
    if status and earlier:
        problems.append("--earlier: adds rows to the folder, and --status changes nothing; give one of them")
    if status and dry_run:
        problems.append("--status and --dry-run: give one of them")
    if problems:
        raise ConfigError(problems)
    plan = load(design)
    cells = chosen(plan, only)
    deadline = None if hours is None else time.monotonic() + 3600 * hours
    conduct = Conduct(plan, out or Path("runs") / plan.name, cells, jobs, Display().line, deadline, earlier)
    if status:
        print("\n".join(conduct.status()))
    elif dry_run:
        conduct.dry_run()
    else:
        print(describe(conduct.go()))
        print(f"\nAll figures: {conduct.out / 'results.json'}; the page: {conduct.out / 'report.md'}")
    return 0
