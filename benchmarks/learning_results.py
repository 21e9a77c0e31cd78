"""The arithmetic, table and pictures of learning.py's results.

Intervals of accuracies and ratios are Student's t over seeds, at 95 %: with five pairs a bootstrap's would be too
narrow. Ratios are taken within pairs of one seed, on the scale of their logarithms, and so are geometric means. Seconds
have their lowest and highest value instead: they differ by the machine's load more than by the seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from trew.eval.statistics import mean_interval
from trew.runs.report import Series, line_chart
from trew.runs.report.svg import side_by_side

NAMES = {"trew": "trew", "trl": "TRL"}
LEVELS = (0.2, 0.3)
"""Held-out accuracies whose seconds are told."""

CLOCKS = ("seconds", "processor_seconds")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures of the table. A level has the seconds of the runs that reach it, and their number."""
    sides = {side: [row for row in rows if row["side"] == side] for side in NAMES}
    return {
        "sides": {side: of_side(own) for side, own in sides.items() if own},
        "pairs": of_pairs(pairs_of(rows)),
    }


def pairs_of(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(trew's run, TRL's run) of every seed that has both."""
    by = {(row["side"], row["seed"]): row for row in rows}
    return [(by["trew", seed], by["trl", seed]) for side, seed in by if side == "trew" and ("trl", seed) in by]


def of_side(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": len(rows)}
    for clock in CLOCKS:
        found[clock] = extent([row["steps"][-1][clock] for row in rows])
    found["accuracy_before"] = interval([held_out(row)[0] for row in rows])
    found["accuracy_after"] = interval([held_out(row)[-1] for row in rows])
    found["foreign_cpu"] = extent([row["load"]["foreign_cpu"] for row in rows])
    found["reached"] = {str(level): reached(rows, level) for level in LEVELS}
    return found


def reached(rows: Sequence[dict[str, Any]], level: float) -> dict[str, Any]:
    """How many runs reach an accuracy, and when."""
    found = {clock: [at for row in rows if (at := time_to(row, level, clock)) is not None] for clock in CLOCKS}
    return {"runs": len(found["seconds"]), **{clock: extent(values) for clock, values in found.items()}}


def of_pairs(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """TRL's seconds as a multiple of trew's, TRL's accuracy minus trew's, and how far TRL was when trew had ended."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for clock in CLOCKS:
        found[f"{clock}_ratio"] = ratio([(a["steps"][-1][clock], b["steps"][-1][clock]) for a, b in pairs])
    for level in LEVELS:
        at = [tuple(time_to(row, level, "processor_seconds") for row in pair) for pair in pairs]
        both = [(a, b) for a, b in at if a and b]
        found[f"processor_seconds_to_{level}_ratio"] = {"pairs": len(both), **ratio(both)}
    found["accuracy_after_difference"] = interval([held_out(b)[-1] - held_out(a)[-1] for a, b in pairs])
    for clock in CLOCKS:
        done = [sum(step[clock] <= a["steps"][-1][clock] for step in b["steps"]) for a, b in pairs]
        found[f"peer_steps_in_the_same_{clock}"] = sum(done) / len(done) if done else None
    return found


def held_out(row: dict[str, Any]) -> list[float]:
    return [found["accuracy"]["mean"] for found in row["evaluations"]]


def time_to(row: dict[str, Any], level: float, clock: str) -> float | None:
    """When the held-out accuracy, a straight line between two evaluations, first reaches ``level``; None: never.

    >>> run = {"evaluations": [{"seconds": s, "accuracy": {"mean": a}} for s, a in ((0, 0.0), (10, 0.5), (20, 0.4))]}
    >>> time_to(run, 0.25, "seconds"), time_to(run, 0.0, "seconds"), time_to(run, 0.6, "seconds")
    (5.0, 0.0, None)
    """
    points = [(found[clock], found["accuracy"]["mean"]) for found in row["evaluations"]]
    if points[0][1] >= level:
        return float(points[0][0])
    for (start, before), (end, after) in itertools.pairwise(points):
        if after >= level:
            return start + (level - before) / (after - before) * (end - start)
    return None


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """The geometric mean of b / a over pairs (a, b).

    >>> {name: round(value, 3) for name, value in ratio([(1.0, 2.0), (1.0, 8.0)]).items()}
    {'mean': 4.0, 'low': 0.001, 'high': 26730.603}
    """
    logs = interval([math.log(b / a) for a, b in pairs])
    return {name: None if value is None else math.exp(value) for name, value in logs.items()}


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and ends; None for what there is not: ends of a single value, the mean of none."""
    found = mean_interval(values)
    given = {"mean": found.mean, "low": found.low, "high": found.high}
    return {name: None if math.isnan(value) else value for name, value in given.items()}


def extent(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, lowest and highest value; None for what there is not, as in :func:`interval`.

    >>> extent([1.0, 4.0, 4.0]), extent([2.0])
    ({'mean': 3.0, 'low': 1.0, 'high': 4.0}, {'mean': 2.0, 'low': None, 'high': None})
    """
    several = len(values) > 1
    return {
        "mean": sum(values) / len(values) if values else None,
        "low": min(values) if several else None, "high": max(values) if several else None,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the page


def page(found: dict[str, Any]) -> str:
    """The part of docs/performance.md: where it was measured, the table, and the ratios."""
    m, budget, sides, pairs = found["machine"], found["budget"], found["summary"]["sides"], found["summary"]["pairs"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    updates = budget["prompts"] // budget["minibatch_prompts"]
    threads = f"{budget['threads']} thread" + "s" * (budget["threads"] > 1)
    counts = " and ".join(f"{own['runs']} of {NAMES[side]}" for side, own in sides.items())
    dates = sorted({row.get("date", found["date"]) for row in found["rows"]})
    when = " to ".join(dates[:1] + dates[1:][-1:])
    lines = [
        f"Measured {when} on {m['cpu']}, {threads} of {m['cores']} cores, beside other work; {versions}. "
        f"Runs: {counts}. Each has {budget['steps']} steps of {budget['prompts']} prompts × {budget['completions']} "
        f"completions, {updates} optimizer steps on each, and {budget['eval_size']} held-out problems.",
        *missing(found), "", table(sides), "", *paired(pairs),
    ]  # fmt: skip
    return "\n".join(lines)


def missing(found: dict[str, Any]) -> list[str]:
    """Says which of the seeds that were asked for have no pair yet."""
    done = {ours["seed"] for ours, _ in pairs_of(found["rows"])}
    left = ", ".join(str(seed) for seed in found["seeds"] if seed not in done)
    return [f"**Not all that was planned has been run**: no pair yet of seed {left}."] if left else []


def table(sides: dict[str, Any]) -> str:
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("held-out accuracy before", lambda own: shown(own["accuracy_before"], 2)),
        ("held-out accuracy after", lambda own: shown(own["accuracy_after"], 2)),
        ("seconds of the training", lambda own: spread(own["seconds"], 0)),
        ("processor seconds of it", lambda own: spread(own["processor_seconds"], 0)),
        ("cores that others kept busy", lambda own: spread(own["foreign_cpu"], 1)),
        *((f"processor seconds to {level}; runs that reach it", reach(str(level))) for level in LEVELS),
    ]
    head = ["mean [95 % over seeds] or (lowest to highest)", *(NAMES[side] for side in sides)]
    lines = [head, ["---"] * len(head), *([name, *(cell(own) for own in sides.values())] for name, cell in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def reach(level: str) -> Callable[[dict[str, Any]], str]:
    def cell(own: dict[str, Any]) -> str:
        found = own["reached"][level]
        return f"{spread(found['processor_seconds'], 0)}; {found['runs']} of {own['runs']}"

    return cell


def paired(pairs: dict[str, Any]) -> list[str]:
    """What the pairs say, one line each."""
    if not pairs["pairs"]:
        return ["No seed has been run on both sides yet, so that there is no ratio."]
    difference = shown(pairs["accuracy_after_difference"], 2, sign="+")
    lines = [
        f"TRL divided by trew, geometric mean over {counted(pairs['pairs'])} of one seed:",
        "",
        f"* seconds of the training: {shown(pairs['seconds_ratio'], 1)}; processor seconds: "
        f"{shown(pairs['processor_seconds_ratio'], 1)}",
    ]
    for level in LEVELS:
        own = pairs[f"processor_seconds_to_{level}_ratio"]
        if own["pairs"]:
            said = f"* processor seconds to a held-out accuracy of {level}: {shown(own, 1)}"
            lines.append(f"{said}, over {counted(own['pairs'])} in which both reach it")
    return [
        *lines,
        f"* held-out accuracy after the same steps, TRL minus trew: {difference}",
        f"* steps that TRL has done in the processor seconds of trew's whole training: "
        f"{pairs['peer_steps_in_the_same_processor_seconds']:.1f}",
    ]


def counted(pairs: int) -> str:
    return f"{pairs} pair" + "s" * (pairs != 1)


def spread(found: dict[str, Any], digits: int) -> str:
    """
    >>> spread({"mean": 3.0, "low": 1.0, "high": 4.0}, 1)
    '3.0 (1.0 to 4.0)'
    """
    return shown(found, digits).replace("[", "(").replace(", ", " to ").replace("]", ")")


def shown(found: dict[str, Any], digits: int, *, sign: str = "") -> str:
    """
    >>> shown({"mean": 0.5, "low": 0.25, "high": 0.75}, 2), shown({"mean": 3.0, "low": None, "high": None}, 0)
    ('0.50 [0.25, 0.75]', '3')
    >>> shown({"mean": None, "low": None, "high": None}, 0)
    '–'
    """
    mean, low, high = (None if found[k] is None else f"{found[k]:{sign}.{digits}f}" for k in ("mean", "low", "high"))
    return "–" if mean is None else mean if low is None else f"{mean} [{low}, {high}]"


# -------------------------------------------------------------------------------------------------------- the picture


def picture(found: dict[str, Any]) -> str:
    """Held-out accuracy over processor seconds and over seconds, and the rollouts' accuracy over steps."""
    width, height = 290, 240
    charts = [
        line_chart(
            [s for colour, side in enumerate(NAMES) for s in lines_of(found["rows"], side, colour, *axes)],
            x_label=label, y_range=(0, 1), width=width, height=height, standalone=False,
        )
        for label, axes in (
            ("processor seconds, held out", ("evaluations", "processor_seconds")),
            ("seconds, held out", ("evaluations", "seconds")),
            ("step, its own rollouts", ("steps", "")),
        )
    ]  # fmt: skip
    legend = [Series(name, [], [], colour=colour) for colour, name in enumerate(NAMES.values())]
    title = "Accuracy of SmolLM2-135M at sums: mean and 95 % over seeds, single runs faint"
    return side_by_side(charts, width=width, height=height, title=title, legend=legend)


def lines_of(rows: Sequence[dict[str, Any]], side: str, colour: int, part: str, clock: str) -> list[Series]:
    """A side's runs, faint, and their mean with its band, at the mean of their times; without a clock, over steps."""
    runs = [[point(at, number, clock) for number, at in enumerate(row[part], 1)] for row in rows if row["side"] == side]
    if not runs:
        return []
    faint = [Series("", [x for x, _ in run], [y for _, y in run], style="faint", colour=colour) for run in runs]
    columns = list(zip(*runs, strict=True))
    x = [sum(at for at, _ in column) / len(column) for column in columns]
    means = [interval([y for _, y in column]) for column in columns]
    low, high = ([within(m[end]) for m in means] for end in ("low", "high"))
    return [*faint, Series("", x, [m["mean"] for m in means], low, high, colour=colour)]


def within(accuracy: float | None) -> float | None:
    return None if accuracy is None else min(max(accuracy, 0.0), 1.0)


def point(at: dict[str, Any], number: int, clock: str) -> tuple[float, float]:
    accuracy = at["accuracy"]
    return (at[clock] if clock else float(number)), accuracy["mean"] if isinstance(accuracy, dict) else accuracy
