"""``trew compare``: compares groups of finished runs, paired by seed, with intervals and corrected p-values."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import tyro

from ..runs.compare import choices as options


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    *,
    metric: str = "final",
    baseline: str = "",
    by: str = "",
    allow: tuple[options.Allow, ...] = (),
    unfinished: options.Unfinished = "refuse",
    json: bool = False,
    html: Path | None = None,
) -> int:
    """Compare finished runs: which settings are better, by how much, and how sure that is.

    Runs that differ in their seed alone form a group. Groups are compared with a baseline, seed by seed; what cannot be
    compared is refused. docs/compare.md explains every figure, and how many seeds it takes.

    Args:
        runs: Run folders, for example runs/a-* runs/b-*: the same seeds for each setting.
        metric: The number that stands for a run: final, last:K (the last K evaluations), area (under the curve),
            reach:0.8 (completions sampled until then), or a column of metrics.jsonl with a number of steps (reward:10).
        baseline: The group that the others are compared with: its name, a value in it, or one of its runs; default: the
            group of the first run.
        by: Settings that make a group, separated by commas (objective.preset,learner.lr); default: all that change what
            is learned.
        allow: Compare although these differ: data, eval, model, version; changes takes runs that went on with changed
            settings for runs of their last ones; one-seed prints scores without intervals. Give it once for each.
        unfinished: What to do with runs that have no summary: refuse them, leave-out (they train still), or count what
            they measured last (they failed).
        json: Print JSON instead of tables.
        html: Also write the comparison as one self-contained HTML file.
    """
    from ..errors import ConfigError
    from ..runs.compare import Choices, compare_runs, describe, to_json, write_page

    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"--html {html}: the folder {html.parent} does not exist")
    keys = tuple(key.strip() for key in by.split(",") if key.strip())
    chosen = Choices(metric=metric, baseline=baseline, by=keys, allow=allow, unfinished=unfinished)
    result = compare_runs(runs, chosen)
    if html is not None:
        write_page(result, html / "compare.html" if html.is_dir() else html)
    print(json_.dumps(to_json(result), indent=2, allow_nan=False) if json else describe(result))
    return 0
