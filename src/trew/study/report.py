"""The report of a study: for the terminal, and as a page in Markdown with pictures beside it."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..eval.comparison import Comparison, Versus
from ..eval.seeds import least_pairs
from ..runs.files import write_atomic
from . import pictures
from .analysis import REACHED, Held, Regime, regimes, spreads, tuning
from .choice import GOOD, Tuned
from .glance import glance
from .rows import LAST
from .tables import Table, aligned, interval_text, markdown, mean_text, numbers, p_text

_ON_THE_PAGE = ("IQM [95 %]", "P(better) [95 %]")
"""Columns that the terminal has no room for."""
_IN_PART = "This is a part of the study"
_KINDS = {"regimes": ("regime", "regimes"), "tasks": ("task", "tasks"), "algorithms": ("algorithm", "algorithms")}
"""The parts of a design: one of them, which is also its name in a row, and several."""


def write_report(found: Mapping[str, Any], folder: Path) -> None:
    """Writes report.md and its pictures into ``folder``."""
    for name, picture in pictures.draw(found).items():
        write_atomic(folder / name, lambda file, picture=picture: file.write(picture.encode()))
    text = "\n".join([f"# {found['study']}", "", *page(found)]) + "\n"
    write_atomic(folder / "report.md", lambda file: file.write(text.encode()))


def describe(found: Mapping[str, Any]) -> str:
    """The comparisons as text for the terminal."""
    lines = [f"{found['study']}: {len(found['runs'])} runs reported, {len(found['tuning'])} for tuning"]
    lines += [line for rest in _unfinished(found) for line in textwrap.wrap(f"{_IN_PART}{rest}", 120)]
    for regime in regimes(found):
        lines += ["", f"{regime.name}: final accuracy (mean of the last {LAST} evaluations)"]
        table = comparison_table(found, regime, regime.final)
        shown = [at for at, head in enumerate(table[0]) if head not in _ON_THE_PAGE]
        lines += aligned([[row[at] for at in shown] for row in table])
        lines += [f"  {regime.why_not}: nothing is compared"] if regime.why_not else []
    return "\n".join(lines)


def page(found: Mapping[str, Any], *, images: str = "") -> Iterator[str]:
    """The results as lines of Markdown; ``images`` is put before the names of pictures."""
    yield from _before_the_first_run(found)
    found_of = regimes(found)
    if len(compared := [regime for regime in found_of if regime.final is not None]) > 1:
        yield from glance(found, compared, images)
    for regime in found_of:
        yield from _regime(found, regime, images)
    if found["tuning"] and tuning(found):
        yield from _tuning(found, images)
    yield from _limits(found)


def _before_the_first_run(found: Mapping[str, Any]) -> Iterator[str]:
    first = (found["history"] or [found])[0]
    design = first["design"]
    yield from [f"**Question.** {design['question']}", ""] if design["question"] else []
    yield (
        f"**Fixed before the first run** (digest `{first['digest']}`): {len(design['algorithms'])} algorithms, tasks "
        f"{', '.join(design['tasks'])}, regimes {', '.join(design['regimes'])}, {design['seeds']} seeds, "
        f"baseline `{design['baseline']}`"
        + (f", {design['tuned']} from {numbers(design['values'])} by {design['tuning_seeds']} tuning seeds that are "
           "never reported" if design["values"] else "")
        + "."
    )  # fmt: skip
    yield ""
    for claim in design["claims"]:
        yield f"* Expected: {claim}"
    yield from [""] if design["claims"] else []
    for line in found["changed"]:
        yield f"* **Changed** {line}"
    yield from [f"* The digest is now `{found['digest']}`."] if found["changed"] else []
    yield from [""] if found["changed"] else []
    for task, model in found["models"].items():
        yield (
            f"Model for {task}: {model['parameters']:,} parameters, made by the study; {model['steps']} supervised "
            f"steps to a probability of {model['accuracy']:.2f} of the right answer."
        )
    for rest in _unfinished(found):
        yield from ["", f"**{_IN_PART}**{rest}"]
    yield ""


def _unfinished(found: Mapping[str, Any]) -> Iterator[str]:
    """Says, behind ``_IN_PART``, what the study has no runs of, or fewer than its design; nothing where every cell has
    all of its seeds."""
    design, runs = found["design"], found["runs"]
    whole = design["seeds"]
    wanted = whole * math.prod(len(design[kind]) for kind in _KINDS)
    if len(runs) >= wanted:
        return
    names = dict.fromkeys([*design["regimes"], *(row["regime"] for row in runs)])
    seeds = {name: len({row["seed"] for row in runs if row["regime"] == name}) for name in names}
    most = max(seeds.values())
    fewer = ", ".join(f"of {name} {count}" for name, count in seeds.items() if 0 < count < most)
    missing = _without_runs(design, runs)
    yield (
        f": {most} of {whole} seeds have runs{f' ({fewer})' if fewer else ''}, "
        f"{len(runs)} of {wanted} runs in all{f'; nothing of {missing} is reported yet' if missing else ''}. It claims "
        "nothing beyond what these can show: verdicts before the last run are looks on the way, and every look more "
        "makes a chance verdict likelier."
    )


def _without_runs(design: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The regimes, tasks and algorithms of which no run is reported; while there is none at all, the regimes."""
    told = []
    for kind, (one, several) in _KINDS.items():
        missing = [name for name in design[kind] if not any(row[one] == name for row in runs)]
        if missing and (runs or kind == "regimes"):
            told.append(f"the {one if len(missing) == 1 else several} {', '.join(missing)}")
    return " and ".join(told)


def _regime(found: Mapping[str, Any], regime: Regime, images: str) -> Iterator[str]:
    design = found["design"]
    settings = ", ".join(f"`{key} = {value}`" for key, value in design["regimes"][regime.name].items()) or "no changes"
    yield from [f"### Regime `{regime.name}`: {settings}", ""]
    if regime.final is None or regime.area is None:
        yield from [f"Nothing is compared: {regime.why_not}.", ""]
    else:
        name = pictures.forest_name(found, regime)
        yield from [f"![Differences to {design['baseline']} in {regime.name}]({images}{name})", ""]
        yield from [f"Accuracy before training: {regime.start():.3f}.", ""]
        yield from _budget(regime)
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
    for names in regime.alike():
        yield from [
            f"The same curves, to the last bit, for every seed: {', '.join(f'`{name}`' for name in names)}.",
            "",
        ]
    part = " of the tasks and seeds that all algorithms have" if regime.shared() != regime.rows else ""
    yield from [f"How the runs went, means over runs{part}:", "", *markdown(_conduct_table(regime)), ""]
    for name in pictures.curve_names(found, regime):
        yield from [f"![Held-out accuracy in {regime.name}]({images}{name})", ""]


def _budget(regime: Regime) -> Iterator[str]:
    """Which algorithms sampled more than is compared."""
    if not regime.whole:
        return
    # Of the tasks, not of the runs: one that failed early has less than is compared.
    budgets = regime.budgets()
    most = sorted({budgets[row.task] for of in regime.whole.values() for row in of})
    told = ", ".join(
        f"`{name}` {np.mean([row.completions[-1] for row in of]):,.0f} (ends at "
        f"{np.mean([row.final for row in of]):.3f})"
        for name, of in regime.whole.items()
    )
    yield (
        f"**Compared at equal completions**, {' or '.join(f'{count:,}' for count in most)} of each run. These sample "
        f"more in a step, and sampled in all: {told}. Their curves are read up to there, interpolated between "
        "evaluations; what else is told of them, but for tokens and updates, is of the whole runs."
    )
    yield ""


def comparison_table(found: Mapping[str, Any], regime: Regime, comparison: Comparison | None) -> Table:
    """One row for each algorithm, sorted by name."""
    head = ["algorithm", "runs", "failed", "mean [95 %]", "IQM [95 %]", "minus the baseline [95 %]", "p",
            "pairs won", "P(better) [95 %]", "would be found", "verdict"]  # fmt: skip
    groups = {} if comparison is None else {group.name: group for group in comparison.groups}
    versus = {} if comparison is None else {v.name: v for v in comparison.versus}
    rows = []
    for name, of in regime.rows.items():
        own = groups.get(name)
        mean = interval_text(own.mean) if own else f"{np.mean([row.final for row in of]):.3f}"
        iqm = interval_text(own.iqm) if own else ""
        against = ["baseline", *[""] * 5] if name == found["design"]["baseline"] else _versus(versus.get(name))
        rows.append([name, str(len(of)), _failed(regime, name), mean, iqm, *against])
    return [head, *rows]


def _held_table(regime: Regime, baseline: str) -> Table:
    head = ["algorithm", "runs", "failed", "share [95 %]", "minus the baseline [95 %]", "p", "verdict"]
    return [head, *([name, str(len(regime.rows[name])), _failed(regime, name), interval_text(held.share),
                     *_against(held, baseline=name == baseline)]
                    for name, held in regime.held.items())]  # fmt: skip


def _against(held: Held, *, baseline: bool) -> list[str]:
    if held.difference is None:
        return ["baseline" if baseline else "not compared", "", ""]
    return [interval_text(held.difference, sign="+"), p_text(held.p_value), held.verdict]


def _versus(v: Versus | None) -> list[str]:
    if v is None:
        return ["not compared", *[""] * 5]
    found = "none" if v.detectable is None else f"{v.detectable:.3f}"
    won = "all equal" if v.verdict == "equal" else f"{v.won} of {v.pairs}"
    return [
        interval_text(v.difference, sign="+"),
        p_text(v.p_value),
        won,
        interval_text(v.improvement, digits=2),
        found,
        v.verdict,
    ]


def _failed(regime: Regime, algorithm: str) -> str:
    reasons = regime.failures(algorithm)
    return "0" if not reasons else "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _reading(comparison: Comparison) -> Iterator[str]:
    """What these pairs can and cannot show."""
    pairs, count = len(comparison.pairs), len(comparison.versus)
    need = least_pairs(count)
    yield (
        f"{pairs} pairs of runs with the same seed. The {count} intervals hold together in 95 of 100 studies; p is "
        "from sign flips, corrected for their number (Holm). A verdict needs both. `pairs won` compares runs of one "
        "seed; P(better) runs of all seeds, and so has the draw of problems in it."
    )
    if pairs < need:
        yield (
            f"**{pairs} pairs cannot show any difference between so many algorithms**, however large: the smallest "
            f"corrected p is above 0.05 until there are {need}."
        )
    elif known := [v.detectable for v in comparison.versus if v.detectable is not None and v.verdict != "equal"]:
        yield (
            f"True differences of {min(known):.3f} to {max(known):.3f}, by algorithm, would have been found in 80 of "
            "100 studies (the column `would be found`), smaller ones less often. *Not told apart* does not mean equal."
        )


def _conduct_table(regime: Regime) -> Table:
    reached = [f"completions to {share:.0%} of the best gain" for share in REACHED]
    head = ["algorithm", *reached, "entropy, end / start", "largest KL of a step", "clipped", "cut off", "no signal",
            "tokens", "updates"]  # fmt: skip
    rows = []
    for name, of in regime.shared().items():
        # None at the end, or 0 at the start, has no ratio.
        ratios = [row.entropy[1] / row.entropy[0] for row in of if row.entropy[0] and row.entropy[1] is not None]
        means = [
            ratios,
            *([getattr(row, figure) for row in of] for figure in ("kl", "clipped", "truncated", "no_signal")),
        ]
        rows.append(
            [name, *("–" if math.isnan(n) else f"{n:.0f}" for n in regime.reached(name)), *map(mean_text, means),
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
        f"Mean height of the held-out curve over {design['tuning_seeds']} tuning seeds; the largest is chosen. `lead`: "
        "mean and standard error, over these seeds, of what the choice is ahead of the next best value; "
        f"`width`: decades around it in which it stays at {GOOD:.0%} or more; `at 3x`: what is left of it at the next "
        "half decade. "
        "A star marks a choice at an end of the grid: the best may lie outside."
    )
    yield ""
    head = ["cell", *(f"{value:g}" for value in design["values"]), "chosen", "lead", "width", "at 3x",
            "failed of all"]  # fmt: skip
    rows = []
    for cell, tuned in sorted(found_of.items()):
        at = tuned.at_three_times
        chosen = f"{tuned.values[tuned.best]:g}{'*' if tuned.at_an_end else ''}"
        if tuned.seeds < design["tuning_seeds"]:
            chosen = f"open ({chosen} by {tuned.seeds} of {design['tuning_seeds']} seeds)"
        total = len(tuned.values) * tuned.seeds
        rows.append(
            [cell.name, *(f"{area:.3f}" for area in tuned.areas), chosen, _lead(tuned), f"{tuned.width:.1f}",
             "not tried" if at is None else f"{at:.0%}", f"{sum(tuned.failed)} of {total}"]
        )  # fmt: skip
    yield from markdown([head, *rows])
    yield ""
    for name in pictures.tuning_names(found):
        yield from [f"![Height of the held-out curve at every {design['tuned']}]({images}{name})", ""]
    yield from _spreads(found)


def _lead(tuned: Tuned) -> str:
    if tuned.runner_up is None:
        return ""
    error = f" ± {tuned.lead_se:.4f}" if math.isfinite(tuned.lead_se) else ""
    return f"{tuned.lead:.4f}{error} on {tuned.values[tuned.runner_up]:g}"


def _spreads(found: Mapping[str, Any]) -> Iterator[str]:
    """How many seeds the tuning runs ask for."""
    baseline = found["design"]["baseline"]
    for spread in spreads(found):
        needed = ", ".join(f"{pairs} pairs find a true difference of {d:g}" for d, pairs in spread.needed.items())
        yield (
            f"* In `{spread.regime}` the differences to `{baseline}` in final accuracy, at the chosen values and over "
            f"the tuning seeds, have a standard deviation of {spread.sd:.3f} (pooled over algorithms). By that, "
            f"{needed} in 80 of 100 studies."
        )
    yield ""


def _limits(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [*found["runs"], *found["tuning"]]
    versions = sorted({row["trew"] for row in rows if row["trew"]})
    if loads := [row["load"] for row in found["runs"]]:
        yield (
            "Intervals and p are corrected for the comparisons within one table, not for there being several tables "
            "and regimes. Everything but the differences of final accuracy, of the curve's height and of the share of "
            "runs that did not fail is exploratory and uncorrected."
        )
        if found["design"]["values"]:
            yield (
                f"They are of algorithms at the chosen {found['design']['tuned']}: that the tuning seeds might have "
                "chosen another value is in no interval."
            )
        yield (
            "What is compared is equal in completions. Seconds are not reported: the machine's load at the ends of "
            f"runs was {min(loads):.1f} to {max(loads):.1f}."
        )
    alike = Counter(row["arithmetic"] for row in rows if row.get("arithmetic"))
    if len(alike) > 1:
        told = "; ".join(f"{how}: {count}" for how, count in alike.most_common())
        yield (
            f"Runs were not computed alike ({told}), so that the same cell and seed need not give the same numbers. "
            "Differences between algorithms have this in them where its runs are not of one kind."
        )
    yield f"Versions of trew: {', '.join(versions) or 'unknown'}."
