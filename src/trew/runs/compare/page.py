"""A comparison as one self-contained HTML file: tables, curves with bands, and the differences with their intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import output_file
from ...eval.seeds import mean_over_seeds
from ...utils.secrets import redact, secrets
from ..files import write_atomic
from ..report import Series, line_chart, page
from ..report.forest import ForestRow, forest
from . import text
from .groups import RunGroup
from .metrics import values_by_step
from .result import ComparedRuns

_CHARTS = (
    # column of metrics.jsonl, title, unit, the range of its axis
    ("eval_accuracy", "Held-out accuracy", "share correct", (0.0, 1.0)),
    ("reward", "Reward in training", "mean per completion", None),
    ("accuracy", "Accuracy in training", "share correct", (0.0, 1.0)),
    ("entropy", "Entropy", "nats per token", None),
    ("kl", "KL", "nats per token", None),
    ("completion_length", "Completion length", "tokens", None),
    ("truncated_share", "Completions cut off at the limit", "share", (0.0, 1.0)),
    ("zero_signal_share", "Groups without signal", "share", (0.0, 1.0)),
    ("grad_norm", "Gradient norm", "before clipping", None),
)


def write_page(result: ComparedRuns, path: Path) -> None:
    """Writes the page to ``path``. Raises StorageError, and ConfigError for a path that cannot be a file."""
    made = render(result, created=page.now())
    write_atomic(path, lambda file: file.write(made.encode("utf-8")), guard=output_file)


def render(result: ComparedRuns, *, created: str = "") -> str:
    """Renders the page. ``created`` is a date for the footer; an empty one is left out."""
    from markupsafe import Markup

    hidden = secrets()
    groups = [_redacted(group, hidden) for group in result.groups]
    return page.render(
        Path(__file__).parent / "compare.html.jinja",
        hidden,
        title=f"{len(groups)} groups of runs" if len(groups) > 1 else "Runs of one setting",
        heading=text.heading(result),
        names=[g.name for g in groups],
        settings=text.settings_rows(result),
        group_headings=text.HEADINGS,
        groups=text.group_rows(result),
        baseline=result.comparison.baseline,
        seeds=text.seeds_of(result) if result.comparison.versus else "",
        versus_headings=text.AGAINST,
        versus=text.versus_rows(result),
        reading=list(text.reading(result)) if result.comparison.versus else [],
        forest=Markup(_forest(result)) if result.comparison.versus else "",
        charts=[Markup(chart) for plan in _CHARTS if (chart := _chart(groups, *plan))],
        notes=list(result.notes),
        left_out=[m.name for m in result.left_out],
        runs=[
            (g.name, m.name, seed, task, text.score(result.scores[m.name], result))
            for g in groups
            for m, (task, seed) in zip(g.members, g.pairs, strict=True)
        ],
        created=created,
    )


def _redacted(group: RunGroup, hidden: tuple[str, ...]) -> RunGroup:
    """The group with secrets masked in the texts of its runs' rows."""
    members = tuple(
        dataclasses.replace(m, data=dataclasses.replace(m.data, rows=tuple(redact(r, hidden) for r in m.data.rows)))
        for m in group.members
    )
    return dataclasses.replace(group, members=members)


def _forest(result: ComparedRuns) -> str:
    rows = [ForestRow(v.name, *v.difference, text=v.verdict, hollow=not v.told_apart) for v in result.comparison.versus]
    return forest(
        rows,
        title=f"Difference to {result.comparison.baseline}, paired by seed",
        x_label=f"{result.metric.title}: difference, simultaneous 95 % intervals",
        standalone=False,
    )


def _chart(
    groups: Sequence[RunGroup], column: str, title: str, unit: str, limits: tuple[float, float] | None
) -> str:  # fmt: skip
    """Each group's mean with a band, over its single runs; empty if no run has the column."""
    # A group has one colour in all charts, by its place in the list.
    series = [s for colour, group in enumerate(groups) for s in _curves(group, column, colour, limits)]
    return line_chart(series, title=title, y_label=unit, y_range=limits, standalone=False) if series else ""


def _curves(group: RunGroup, column: str, colour: int, limits: tuple[float, float] | None) -> list[Series]:
    runs = [
        (task, values)
        for task, m in zip(group.tasks, group.members, strict=True)
        if (values := values_by_step(m, column))
    ]
    if not runs:
        return []
    # Single runs behind their mean.
    faint = [Series("", sorted(v), [v[s] for s in sorted(v)], style="faint", colour=colour) for _, v in runs]
    band = _mean(group.name, runs, colour, limits)
    return [*faint, band] if len(runs) > 1 else [band]


def _mean(
    name: str, runs: Sequence[tuple[str, Mapping[int, Any]]], colour: int, limits: tuple[float, float] | None
) -> Series:
    """The mean of a group's runs, each with its task, with its band."""
    # A mean over other runs at every step would jump where a run ends or has a gap.
    steps = sorted(set.intersection(*(set(v) for _, v in runs)))
    # As in the tables, each task counts the same, and how much tasks differ is no uncertainty.
    tasks = [[v for of, v in runs if of == task] for task in dict.fromkeys(task for task, _ in runs)]
    means = [mean_over_seeds([[v[s] for v in of] for of in tasks]) for s in steps]
    # An interval of a share may leave 0 to 1; its band must not.
    least, most = limits or (float("-inf"), float("inf"))
    return Series(
        name, steps, [m.mean for m in means], [max(m.low, least) for m in means],
        [min(m.high, most) for m in means], colour=colour,
    )  # fmt: skip
