"""The report of a study: for the terminal, and as a page in Markdown with pictures beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..eval.comparison import Comparison, Versus
from ..eval.seeds import least_pairs
from ..eval.statistics import Interval
from ..runs.files import write_atomic
from . import pictures
from .analysis import REACHED, Held, Regime, regimes, spreads, tuning
from .choice import GOOD
from .rows import LAST

Table = list[list[str]]

_ON_THE_PAGE = ("IQM [95 %]", "P(better) [95 %]")
"""Columns that the terminal has no room for."""


def write_report(found: Mapping[str, Any], folder: Path) -> None:
    """Writes report.md and its pictures into ``folder``."""
    for name, picture in pictures.draw(found).items():
        write_atomic(folder / name, lambda file, picture=picture: file.write(picture.encode()))
    text = "\n".join([f"# {found['study']}", "", *page(found)]) + "\n"
    write_atomic(folder / "report.md", lambda file: file.write(text.encode()))


def describe(found: Mapping[str, Any]) -> str:
    """The comparisons as text for the terminal."""
    lines = [f"{found['study']}: {len(found['runs'])} runs reported, {len(found['tuning'])} for tuning"]
    for regime in regimes(found):
        lines += ["", f"{regime.name}: final accuracy (mean of the last {LAST} evaluations)"]
        table = comparison_table(found, regime, regime.final)
        shown = [at for at, head in enumerate(table[0]) if head not in _ON_THE_PAGE]
        lines += _aligned([[row[at] for at in shown] for row in table])
        lines += [f"  {regime.why_not}: nothing is compared"] if regime.why_not else []
    return "\n".join(lines)


def page(found: Mapping[str, Any], *, images: str = "") -> Iterator[str]:
    """The results as lines of Markdown; ``images`` is put before the names of pictures."""
    yield from _before_the_first_run(found)
    found_of = regimes(found)
    if len(compared := [regime for regime in found_of if regime.final is not None]) > 1:
        yield from _glance(found, compared, images)
    for regime in found_of:
        yield from _regime(found, regime, images)
    if found["tuning"] and tuning(found):
        yield from _tuning(found, images)
    yield from _limits(found)


def _before_the_first_run(found: Mapping[str, Any]) -> Iterator[str]:
    design = found["design"]
    yield from [f"**Question.** {design['question']}", ""] if design["question"] else []
    yield (
        f"**Fixed before the first run** (digest `{found['digest']}`): {len(design['algorithms'])} algorithms, tasks "
        f"{', '.join(design['tasks'])}, regimes {', '.join(design['regimes'])}, {design['seeds']} seeds, "
        f"baseline `{design['baseline']}`"
        + (f", {design['tuned']} from {_numbers(design['values'])} by {design['tuning_seeds']} tuning seeds that are "
           "never reported" if design["values"] else "")
        + "."
    )  # fmt: skip
    yield ""
    for claim in design["claims"]:
        yield f"* Expected: {claim}"
    yield from [""] if design["claims"] else []
    for line in found["changed"]:
        yield f"* **Changed** {line}"
    yield from [""] if found["changed"] else []
    for task, model in found["models"].items():
        yield (
            f"Model for {task}: {model['parameters']:,} parameters, made by the study; {model['steps']} supervised "
            f"steps to a probability of {model['accuracy']:.2f} of the right answer."
        )
    yield from _unfinished(found)
    yield ""


def _unfinished(found: Mapping[str, Any]) -> Iterator[str]:
    """Says which regimes have fewer seeds than the design; nothing where all have theirs."""
    whole = found["design"]["seeds"]
    runs = [(row["regime"], row["seed"]) for row in found["runs"]]
    names = dict.fromkeys([*found["design"]["regimes"], *(regime for regime, _ in runs)])
    seeds = {name: len({seed for regime, seed in runs if regime == name}) for name in names}
    most = max(seeds.values())
    if min(seeds.values()) >= whole:
        return
    fewer = ", ".join(f"of {name} {count}" for name, count in seeds.items() if 0 < count < most)
    without = [name for name, count in seeds.items() if not count]
    noun = "regime" if len(without) == 1 else "regimes"
    missing = f"; nothing of the {noun} {', '.join(without)} is reported yet" if without else ""
    yield ""
    yield (
        f"**This is a part of the study**: {most} of {whole} seeds have runs{f' ({fewer})' if fewer else ''}, "
        f"{len(found['runs'])} runs in all{missing}. It claims nothing beyond what these can show."
    )


def _glance(found: Mapping[str, Any], compared: Sequence[Regime], images: str) -> Iterator[str]:
    """The differences of all regimes next to each other."""
    baseline = found["design"]["baseline"]
    yield from ["### All regimes", ""]
    yield from [f"![Differences to {baseline} in all regimes]({images}{pictures.glance_name(found)})", ""]
    yield f"Final accuracy minus that of `{baseline}`; in bold where the verdict below is better or worse:"
    yield from ["", *markdown(_glance_table({r.name: r.final for r in compared if r.final})), ""]
    yield from ["Mean height of the held-out curve, in the same way:", ""]
    yield from [*markdown(_glance_table({r.name: r.area for r in compared if r.area})), ""]


def _glance_table(comparisons: Mapping[str, Comparison]) -> Table:
    """One row for each algorithm, sorted by name, and one column for each regime."""
    cells = {(name, v.name): _glance_cell(v) for name, comparison in comparisons.items() for v in comparison.versus}
    head = ["algorithm", *(f"{name}, {len(comparison.pairs)} pairs" for name, comparison in comparisons.items())]
    names = sorted({name for _, name in cells})
    return [head, *([name, *(cells.get((regime, name), "") for regime in comparisons)] for name in names)]


def _glance_cell(v: Versus) -> str:
    if v.verdict == "equal":
        return "equal"
    text = _interval(v.difference, sign="+")
    return f"**{text}**" if v.told_apart else text


def _regime(found: Mapping[str, Any], regime: Regime, images: str) -> Iterator[str]:
    design = found["design"]
    settings = ", ".join(f"`{key} = {value}`" for key, value in design["regimes"][regime.name].items()) or "no changes"
    yield from [f"### Regime `{regime.name}`: {settings}", ""]
    if regime.final is None or regime.area is None:
        yield from [f"Nothing is compared: {regime.why_not}.", ""]
    else:
        name = pictures.forest_name(found, regime)
        yield from [f"![Differences to {design['baseline']} in {regime.name}]({images}{name})", ""]
        yield from [f"Final held-out accuracy (mean of the last {LAST} evaluations):", ""]
        yield from markdown(comparison_table(found, regime, regime.final))
        yield from ["", *_reading(regime.final), "", "Mean height of the held-out curve:", ""]
        yield from markdown(comparison_table(found, regime, regime.area))
        yield ""
        if any(row.failed for rows in regime.rows.values() for row in rows):
            yield from ["Share of runs that did not fail:", ""]
            yield from markdown(_held_table(regime, design["baseline"]))
            yield ""
            yield (
                f"The {len(regime.final.versus)} intervals of differences hold together in 95 of 100 studies "
                "(Newcombe's for paired shares, at Bonferroni's level); p is that of McNemar's exact test, corrected "
                "(Holm)."
            )
            yield ""
    yield from ["How the runs went, means over runs:", "", *markdown(_conduct_table(regime)), ""]
    for name in pictures.curve_names(found, regime):
        yield from [f"![Held-out accuracy in {regime.name}]({images}{name})", ""]


def comparison_table(found: Mapping[str, Any], regime: Regime, comparison: Comparison | None) -> Table:
    """One row for each algorithm, sorted by name."""
    head = ["algorithm", "runs", "failed", "mean [95 %]", "IQM [95 %]", "minus the baseline [95 %]", "p",
            "P(better) [95 %]", "would be found", "verdict"]  # fmt: skip
    groups = {} if comparison is None else {group.name: group for group in comparison.groups}
    versus = {} if comparison is None else {v.name: v for v in comparison.versus}
    rows = []
    for name, of in regime.rows.items():
        own = groups.get(name)
        mean = _interval(own.mean) if own else f"{np.mean([row.final for row in of]):.3f}"
        iqm = _interval(own.iqm) if own else ""
        against = ["baseline", *[""] * 4] if name == found["design"]["baseline"] else _versus(versus.get(name))
        rows.append([name, str(len(of)), _failed(regime, name), mean, iqm, *against])
    return [head, *rows]


def _held_table(regime: Regime, baseline: str) -> Table:
    head = ["algorithm", "runs", "failed", "share [95 %]", "minus the baseline [95 %]", "p", "verdict"]
    return [head, *([name, str(len(regime.rows[name])), _failed(regime, name), _interval(held.share),
                     *_against(held, baseline=name == baseline)]
                    for name, held in regime.held.items())]  # fmt: skip


def _against(held: Held, *, baseline: bool) -> list[str]:
    if held.difference is None:
        return ["baseline" if baseline else "not compared", "", ""]
    return [_interval(held.difference, sign="+"), _p(held.p_value), held.verdict]


def _versus(v: Versus | None) -> list[str]:
    if v is None:
        return ["not compared", *[""] * 4]
    found = "none" if v.detectable is None else f"{v.detectable:.3f}"
    return [_interval(v.difference, sign="+"), _p(v.p_value), _interval(v.improvement, digits=2), found, v.verdict]


def _failed(regime: Regime, algorithm: str) -> str:
    reasons = regime.failures(algorithm)
    return "0" if not reasons else "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _reading(comparison: Comparison) -> Iterator[str]:
    """What these pairs can and cannot show."""
    pairs, count = len(comparison.pairs), len(comparison.versus)
    need = least_pairs(count)
    yield (
        f"{pairs} pairs of runs with the same seed. The {count} intervals hold together in 95 of 100 studies; p is "
        "from sign flips, corrected for their number (Holm). A verdict needs both."
    )
    if pairs < need:
        yield (
            f"**{pairs} pairs cannot show any difference between so many algorithms**, however large: the smallest "
            f"corrected p is above 0.05 until there are {need}."
        )
    elif known := [v.detectable for v in comparison.versus if v.detectable is not None]:
        yield (
            f"What could not have been found: true differences below {min(known):.3f} to {max(known):.3f} (80 % power, "
            "the column `would be found`). *Not told apart* does not mean equal."
        )


def _conduct_table(regime: Regime) -> Table:
    reached = [f"completions to {share:.0%} of the best gain" for share in REACHED]
    head = ["algorithm", *reached, "entropy, end / start", "largest KL of a step", "clipped", "cut off", "no signal",
            "tokens", "updates"]  # fmt: skip
    rows = []
    for name, of in regime.rows.items():
        # None at the end, or 0 at the start, has no ratio.
        ratios = [row.entropy[1] / row.entropy[0] for row in of if row.entropy[0] and row.entropy[1] is not None]
        rows.append(
            [name, *(f"{count:.0f}" for count in regime.reached(name)), _mean(ratios), _mean([r.kl for r in of]),
             _mean([r.clipped for r in of]), _mean([r.truncated for r in of]), _mean([r.no_signal for r in of]),
             f"{np.mean([r.tokens[-1] for r in of]):.0f}", f"{np.mean([r.optimizer_steps for r in of]):.0f}"]
        )  # fmt: skip
    return [head, *rows]


def _tuning(found: Mapping[str, Any], images: str) -> Iterator[str]:
    design = found["design"]
    yield from [f"### Choice of `{design['tuned']}`", ""]
    found_of = tuning(found)
    if open_ := sum(tuned.seeds < design["tuning_seeds"] for tuned in found_of.values()):
        yield (
            f"**Tuning is not complete**: {open_} of these cells have no choice yet. Each row is of the seeds that "
            "have a run at every value."
        )
        yield ""
    yield (
        f"Mean height of the held-out curve over {design['tuning_seeds']} tuning seeds; the largest is chosen. "
        f"`width`: decades around it in which it stays at {GOOD:.0%} or more; `at 3x`: what is left of it at the next "
        "half decade. "
        "A star marks a choice at an end of the grid: the best may lie outside."
    )
    yield ""
    head = ["cell", *(f"{value:g}" for value in design["values"]), "chosen", "width", "at 3x", "failed of all"]
    rows = []
    for cell, tuned in sorted(found_of.items()):
        at = tuned.at_three_times
        chosen = f"{tuned.values[tuned.best]:g}{'*' if tuned.at_an_end else ''}"
        if tuned.seeds < design["tuning_seeds"]:
            chosen = f"open ({chosen} by {tuned.seeds} of {design['tuning_seeds']} seeds)"
        total = len(tuned.values) * tuned.seeds
        rows.append(
            [cell.name, *(f"{area:.3f}" for area in tuned.areas), chosen, f"{tuned.width:.1f}",
             "not tried" if at is None else f"{at:.0%}", f"{sum(tuned.failed)} of {total}"]
        )  # fmt: skip
    yield from markdown([head, *rows])
    yield ""
    for name in pictures.tuning_names(found):
        yield from [f"![Height of the held-out curve at every {design['tuned']}]({images}{name})", ""]
    yield from _spreads(found)


def _spreads(found: Mapping[str, Any]) -> Iterator[str]:
    """How many seeds the tuning runs ask for."""
    baseline = found["design"]["baseline"]
    for spread in spreads(found):
        needed = ", ".join(f"{pairs} find a true difference of {d:g}" for d, pairs in spread.needed.items())
        yield (
            f"* In `{spread.regime}` the differences to `{baseline}` in final accuracy, at the chosen values and over "
            f"the tuning seeds, have a standard deviation of {spread.sd:.3f} (pooled over algorithms). By that, of "
            f"pairs, {needed} in 80 of 100 studies."
        )
    yield ""


def _limits(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [*found["runs"], *found["tuning"]]
    versions = sorted({row["trew"] for row in rows if row["trew"]})
    if loads := [row["load"] for row in found["runs"]]:
        yield (
            "Intervals and p are corrected for the comparisons within one table, not for there being several tables "
            "and regimes. All but the differences of final accuracy, of the curve's height and of the share of runs "
            "that did not fail is exploratory and uncorrected."
        )
        yield (
            "Budgets are equal in completions. Seconds are not reported: the machine's load at the ends of runs was "
            f"{min(loads):.1f} to {max(loads):.1f}."
        )
    yield f"Versions of trew: {', '.join(versions) or 'unknown'}."


# --------------------------------------------------------------------------------------------------------------- tables


def markdown(table: Table) -> Iterator[str]:
    head, *rows = table
    yield from (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _aligned(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in table]


def _interval(interval: Interval, *, sign: str = "", digits: int = 3) -> str:
    mean = f"{interval.mean:{sign}.{digits}f}"
    if not math.isfinite(interval.low):
        return f"{mean} [no interval]"
    return f"{mean} [{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def _p(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3g}" if known else "–"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
