"""Writes one HTML file about one or several runs: no script, no external resource, all untrusted text escaped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, output_file
from ...utils.secrets import redact, secrets
from ...utils.user_files import short_name
from . import page
from .conversation import Said, conversation
from .heat import heat_strip
from .read import RunData, given_by_data, load_run, load_samples, name_of_given, names_of, points, sample_steps
from .svg import Series, line_chart, running_mean
from .text import number, shorten
from .tokens import coloured
from .visits import Change, Visits, completions_of, load_visits

_WINDOW = 10
_SMOOTH_FROM = 30  # steps; shorter curves are not smoothed

_CHARTS: tuple[tuple[str, str, str, tuple[float, float] | None], ...] = (
    # metric, title, unit, fixed range
    ("reward", "Reward", "mean per completion", None),
    ("accuracy", "Accuracy", "share correct", (0.0, 1.0)),
    ("entropy", "Entropy", "nats per token", None),
    ("kl", "KL", "nats per token", None),
    ("ratio", "Importance ratio", "mean", None),
    ("clip_share", "Clipped tokens", "share", None),
    ("ess", "Effective sample size", "share of tokens", (0.0, 1.0)),
    ("correction", "Mismatch correction", "mean factor", None),
    ("entropy_coefficient", "Entropy bonus", "coefficient", None),
    ("completion_length", "Completion length", "tokens", None),
    ("truncated_share", "Completions cut off at the limit", "share", (0.0, 1.0)),
    ("zero_signal_share", "Groups without signal", "share", (0.0, 1.0)),
    ("tokens_per_second", "Speed", "tokens per second", None),
    ("update/seconds", "Seconds of a step", "in the update", None),
    ("grad_norm", "Gradient norm", "before clipping", None),
    ("loss", "Loss", "", None),
    ("lr", "Learning rate", "", None),
)
_DRAWN_TOGETHER = {
    "ratio": {"ratio_q99": "99 % of tokens below", "ratio_q01": "1 % below"},
    "update/seconds": {"rollouts/seconds": "rollouts and rewards", "publish/seconds": "publishing weights"},
}
"""Metrics drawn in another metric's chart for a single run, and in separate charts for several runs."""
_ENDS = ("mean", "low", "high")
_HELD_OUT = {
    "accuracy": ("eval_accuracy", "eval_low", "eval_high"), "loss": ("eval_loss", "eval_loss_low", "eval_loss_high"),
}  # fmt: skip
"""Metrics that are measured on held-out data, too: the names there, of the value and its interval."""
_NOT_DRAWN = frozenset(
    {*(name for names in _HELD_OUT.values() for name in names), "eval_n", "eval_perplexity", "seconds",
     "policy_version", "epoch"}
)  # fmt: skip
_OF_SETS = ("eval_low/", "eval_high/", "eval_n/")
"""Metrics of single data sets that are not drawn, likewise."""


@dataclass(frozen=True, slots=True)
class _ShownCompletion:
    """One completion as the report shows it."""

    when: str
    text: str
    facts: tuple[tuple[str, str], ...]
    said: tuple[Said, ...] = ()  # of an episode, instead of its text


@dataclass(frozen=True, slots=True)
class _ShownPrompt:
    prompt: str
    expected: str
    answers: tuple[_ShownCompletion, ...]
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Scores:
    """How the scores of a run's completions changed: their distribution, and the prompts that changed most."""

    name: str
    strip: str
    read: str  # which steps, if not all
    gains: list[_ShownPrompt]
    losses: list[_ShownPrompt]
    again: int  # prompts that were trained on at least twice


def render_report(runs: Sequence[RunData], *, created: str = "") -> str:
    """Renders the page. ``created`` is a date for the footer; an empty one is left out."""
    from markupsafe import Markup

    hidden = secrets()
    runs = [dataclasses.replace(run, rows=tuple(redact(row, hidden) for row in run.rows)) for run in runs]
    names = names_of([run.folder for run in runs])
    charts, more = _charts(names, runs)
    return page.render(
        Path(__file__).parent / "report.html.jinja",
        hidden,
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        charts=list(map(Markup, charts)),
        more=list(map(Markup, more)),
        created=created,
        **_sections(list(zip(names, runs, strict=True))),
    )


def _sections(named: Sequence[tuple[str, RunData]]) -> dict[str, list[Any]]:
    return {
        "facts": [(name, _facts(run)) for name, run in named],
        "headings": _headings([run for _, run in named]),
        "results": [row for name, run in named for row in (_result(name, run), *_set_results(name, run))],
        "samples": [(name, _samples(run)) for name, run in named],
        "scores": [
            _Scores(name, *_scores(run, load_visits(run.folder)))
            for name, run in named
            if not given_by_data(run.config)  # what the data gave was not judged
        ],
        "tokens": [(name, coloured(run.folder, given=given_by_data(run.config))) for name, run in named],
        "configs": [(name, run.config_text) for name, run in named],
        "outcomes": [(name, text) for name, run in named for text in (*run.changed, *run.outcome)],
        "told": [(name, _told_before(run)) for name, run in named],
        "health": [(name, run.health) for name, run in named],
        "notes": [f"{name}: {note}" for name, run in named for note in _notes(run)],
    }


def write_report(folders: Iterable[str | Path] | str | Path, out: str | Path | None = None) -> Path:
    """Writes the report of the runs in ``folders`` and returns its path: ``out``; by default report.html in the folder
    of a single run, or in the working directory for several. Raises DataError, StorageError, and ConfigError where that
    is a run's folder with a page of its own.
    """
    from ..files import write_atomic

    given = [folders] if isinstance(folders, (str, Path)) else folders  # one text is no list of letters
    places = [Path(folder) for folder in given]
    runs = [load_run(place) for place in places]
    path = Path(out) if out else (places[0] / "report.html" if len(places) == 1 else Path("report.html"))
    if out is None and len(places) > 1 and path.exists() and Path("config.toml").exists():
        raise ConfigError("report.html: is the page of the run whose folder this is; name another file with --out")
    text = render_report(runs, created=page.now())
    write_atomic(path, lambda file: file.write(text.encode("utf-8")), guard=output_file if out else None)
    return path


# ------------------------------------------------------------------------------------------------------------ contents


def _facts(run: RunData) -> list[tuple[str, str]]:
    """The facts about a run, from its summary, or from its configuration while it has none."""
    s, c = run.summary, run.config
    objective = short_name(str(s.get("objective") or _get(c, "objective", "preset") or ""))
    steps = s.get("steps", max((row["step"] for row in run.rows), default=0))
    memory = s.get("peak_memory_bytes")
    facts = {
        "task": s.get("task") or _get(c, "data", "task"),
        "model": s.get("model") or c.get("model"),
        "objective": objective,
        "seed": s.get("seed", c.get("seed")),
        "steps": f"{steps}" + ("" if s else f" of {c.get('steps', '?')}, not finished"),
        "time": _duration(s.get("seconds")),
        "where it went": _shares_of_time(run),
        "speed": f"{number(s['tokens_per_second'])} tokens/s" if s.get("tokens_per_second") else None,
        "peak memory": f"{memory / 2**30:.2f} GiB" if isinstance(memory, (int, float)) else None,
        "device": s.get("device"),
        "versions": _versions(s.get("versions")),
    }
    return [(k, str(v)) for k, v in facts.items() if v not in (None, "")]


def _shares_of_time(run: RunData) -> str | None:
    parts = {"rollouts": "rollouts and rewards", "update": "update", "publish": "publishing weights"}
    spent = {
        text: sum(value or 0.0 for value in points(run.rows, f"{name}/seconds")[1]) for name, text in parts.items()
    }
    if not (whole := sum(spent.values())):
        return None
    return ", ".join(f"{text} {seconds / whole:.0%}" for text, seconds in spent.items())


def _get(table: Mapping[str, Any], section: str, key: str) -> Any:
    inner = table.get(section)
    return inner.get(key) if isinstance(inner, Mapping) else None


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _versions(versions: Any) -> str | None:
    if isinstance(versions, Mapping):
        return ", ".join(f"{k} {v}" for k, v in versions.items())
    return None if versions is None else str(versions)


def _headings(runs: Sequence[RunData]) -> list[str]:
    what = "" if any(map(_by_loss, runs)) else "accuracy "
    return [f"{what}before", f"{what}after"]


def _by_loss(run: RunData) -> bool:
    """Whether the loss is all that is known of what was held out: of a reward model, its accuracy is, too."""
    return any("eval_loss" in row and "eval_accuracy" not in row for row in run.rows)


def _result(name: str, run: RunData) -> dict[str, str]:
    """Accuracy or loss before and after, from the summary, or from the first and the latest evaluation while it has
    none."""
    what = "loss" if _by_loss(run) else "accuracy"
    names = _HELD_OUT[what]
    evals = [row for row in run.rows if names[0] in row]
    first, last = (evals[0], evals[-1]) if evals else ({}, {})
    before = _interval(run.summary.get(f"{what}_before")) or _from_row(first, names)
    after = _interval(run.summary.get(f"{what}_after")) or _from_row(last if len(evals) > 1 else {}, names)
    counts = [_get(run.summary, when, "n") for when in ("before", "after")]
    if None in counts:  # of a loss, or while it has no summary
        counts = [row.get("eval_n") for row in (first, last)]
    n = _counts(*counts, otherwise=run.summary.get("n_eval"))
    shown = _share if what == "accuracy" else _loss
    gain = _gain(before, after, points=what == "accuracy")
    return {"name": name, "n": n, "before": shown(before), "after": shown(after), "gain": gain}


def _set_results(name: str, run: RunData) -> list[dict[str, str]]:
    """The same for each of several data sets."""
    found = []
    evals = [row for row in run.rows if "eval_accuracy" in row]
    for key in (key for key in (evals[-1] if evals else {}) if key.startswith("eval_accuracy/")):
        own = key.removeprefix("eval_accuracy/")
        names = [f"{column}/{own}" for column in _HELD_OUT["accuracy"]]
        before = _from_row(evals[0], names)
        after = _from_row(evals[-1], names) if len(evals) > 1 else None
        found.append({
            "name": f"{name}: {own}", "n": _counts(*(row.get(f"eval_n/{own}") for row in (evals[0], evals[-1]))),
            "before": _share(before), "after": _share(after), "gain": _gain(before, after),
        })  # fmt: skip
    return found


def _counts(before: Any, after: Any, *, otherwise: Any = None) -> str:
    """How many prompts were judged: ``14, then 16`` where that is not the same before and after."""
    after = otherwise if after is None else after
    return number(after) if before in (None, after) else f"{number(before)}, then {number(after)}"


def _gain(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, *, points: bool = True) -> str:
    """``+12.5 points, intervals apart``; a dash where an end of an interval is unknown."""
    if not before or not after or None in (*before.values(), *after.values()):
        return "–"
    # Overlap does not mean that there is no difference: it takes an interval of the difference to say that.
    apart = after["low"] > before["high"] or before["low"] > after["high"]
    change = after["mean"] - before["mean"]
    moved = f"{100 * change:+.1f} points" if points else f"{change:+.3g}"
    return f"{moved}, intervals {'apart' if apart else 'overlap'}"


def _from_row(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """The interval of an evaluation, from the columns of its mean, its low and its high end."""
    return _interval({key: row.get(name) for key, name in zip(_ENDS, names, strict=True)}) if row else None


def _interval(table: Any) -> dict[str, Any] | None:
    """mean, low and high, each a number or None; None for anything else (a summary edited by hand)."""
    if not isinstance(table, Mapping):
        return None
    ends = {key: table.get(key) for key in _ENDS}
    return {key: value if isinstance(value, (int, float)) else None for key, value in ends.items()}


def _share(interval: Mapping[str, Any] | None) -> str:
    """``12.5 % [9.1, 16.9]``"""
    if not interval or interval.get("mean") is None:
        return "–"
    text = f"{100 * interval['mean']:.1f} %"
    low, high = interval.get("low"), interval.get("high")
    return text if low is None or high is None else f"{text} [{100 * low:.1f}, {100 * high:.1f}]"


def _loss(interval: Mapping[str, Any] | None) -> str:
    """``loss 1.25 [1.1, 1.4]``"""
    if not interval or interval.get("mean") is None:
        return "–"
    low, high = interval.get("low"), interval.get("high")
    ends = "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    return f"loss {number(interval['mean'])}{ends}"


def _told_before(run: RunData) -> list[str]:
    """What was said before the start: of rows that were left out, for example, which change what its figures are of."""
    told = run.summary.get("notes")
    return [text for text in told if isinstance(text, str)] if isinstance(told, list) else []


def _notes(run: RunData) -> list[str]:
    """Warnings that a reader needs before trusting the curves."""
    notes = list(run.notes)
    bad: dict[str, list[int]] = {}
    for row in run.rows:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                bad.setdefault(key, []).append(row["step"])
    for key, steps in bad.items():
        some = ", ".join(map(str, steps[:5])) + (", …" if len(steps) > 5 else "")
        notes.append(f"{key} was not a finite number at step {some} (a gap in its curve)")
    return notes


# -------------------------------------------------------------------------------------------------------------- curves


def _charts(names: Sequence[str], runs: Sequence[RunData]) -> tuple[list[str], list[str]]:
    """The main charts, and the charts of all other metrics."""
    main = [_chart(names, runs, *plan) for plan in _CHARTS]
    rest = _other_metrics(runs)
    # Each reward's own curve belongs to the main charts; diagnostics are folded away below.
    rewards = [m for m in rest if m.startswith("reward/")]
    main += [_chart(names, runs, m, m, "", None) for m in rewards]
    more = [_chart(names, runs, m, m, "", None) for m in rest if m not in rewards]
    return list(filter(None, main)), list(filter(None, more))


def _other_metrics(runs: Sequence[RunData]) -> list[str]:
    """The metrics that no main chart shows, in the order of first appearance."""
    shown = {metric for metric, *_ in _CHARTS} | _NOT_DRAWN
    if len(runs) == 1:
        shown |= {metric for together in _DRAWN_TOGETHER.values() for metric in together}
    found = dict.fromkeys(metric for run in runs for metric in run.metric_names())
    return [metric for metric in found if metric not in shown and not metric.startswith(_OF_SETS)]


def _chart(
    names: Sequence[str],
    runs: Sequence[RunData],
    metric: str,
    title: str,
    unit: str,
    fixed: tuple[float, float] | None,
) -> str:
    """The chart of one metric over all runs; empty when no run has the metric."""
    series = [s for i, run in enumerate(runs) for s in _curve(run, metric, names[i], i, alone=len(runs) == 1)]
    if series and len(runs) == 1:
        # Colours 0 and 1 belong to the metric itself and its running mean.
        more = [(label, *points(runs[0].rows, m)) for m, label in _DRAWN_TOGETHER.get(metric, {}).items()]
        series += [Series(label, x, y, colour=i) for i, (label, x, y) in enumerate(more, start=2) if x]
    return line_chart(series, title=title, y_label=unit, y_range=fixed, standalone=False) if series else ""


def _curve(run: RunData, metric: str, name: str, colour: int, *, alone: bool) -> list[Series]:
    """The series of one run's metric: a long curve faintly with its running mean; for accuracy, evaluations too."""
    steps, values = points(run.rows, metric)
    label = ("training" if metric in _HELD_OUT else "") if alone else name
    series: list[Series] = []
    # Short curves show their values alone.
    if len(steps) >= _SMOOTH_FROM:
        smooth = running_mean(values, window=_WINDOW, steps=steps)
        mean = f"mean of the last {_WINDOW} steps" if alone else f"{name}, mean of the last {_WINDOW}"
        series = [
            Series("each step" if alone else "", steps, values, style="faint", colour=colour),
            Series(mean, steps, smooth, colour=colour),
        ]
    elif steps:
        series = [Series(label, steps, values, colour=colour)]
    return series + (_evaluations(run, metric, name, colour, alone=alone) if metric in _HELD_OUT else [])


def _evaluations(run: RunData, metric: str, name: str, colour: int, *, alone: bool) -> list[Series]:
    """The held-out values of one run as points with their intervals; no series before the first evaluation."""
    held_out, *bounds = _HELD_OUT[metric]
    at, values = points(run.rows, held_out)
    if not at:
        return []
    by_step = {row["step"]: row for row in run.rows if held_out in row}
    ends = [[by_step[s].get(k) for s in at] for k in bounds]
    known = bounds[0] in {key for row in run.rows for key in row}  # not of a reward model's loss
    label = f"held-out{', 95 % interval' * known}" if alone else f"{name}, held-out"
    return [Series(label, at, values, *ends, style="points", colour=colour + 1 if alone else colour)]


# ------------------------------------------------------------------------------------------------------------- samples


def _samples(run: RunData, *, most: int = 8) -> list[_ShownPrompt]:
    """Completions of the same held-out prompts before and after training, or of the last step without evaluations."""
    steps = sample_steps(run.folder, "evals")
    if len(steps) >= 2:
        before, after = (load_samples(run.folder, kind="evals", step=s) for s in (steps[0], steps[-1]))
        later = {(r["uid"], r["sample"]): r for r in after}
        pairs = [(r, later[key]) for r in before if (key := (r["uid"], r["sample"])) in later]
        return [
            _ShownPrompt(
                _prompt(a), _expected(a), (_answer(a, "before training"), _answer(b, f"after step {b['step']}"))
            )
            for a, b in pairs[:most]
        ]
    rows = load_samples(run.folder, kind="rollouts")
    if given := given_by_data(run.config):
        return [_ShownPrompt(_prompt(r), "", (_given(r, given),)) for r in rows[:most]]
    # The best and the worst, so that a page of good completions does not hide bad ones.
    rows = sorted(rows, key=lambda r: -math.inf if r["score"] is None else r["score"], reverse=True)
    chosen = rows if len(rows) <= most else [*rows[: most // 2], *rows[-(most // 2) :]]
    return [_ShownPrompt(_prompt(r), _expected(r), (_answer(r, f"step {r['step']}"),)) for r in chosen]


def _scores(run: RunData, visits: Visits, *, most: int = 3) -> tuple[Any, ...]:
    """The fields of ``_Scores`` behind the name."""
    from markupsafe import Markup

    changes = visits.changes()
    # Cut before _changed, which reads two tables for each.
    gains = [_changed(run.folder, change) for change in [c for c in reversed(changes) if c.gain > 0][:most]]
    losses = [_changed(run.folder, change) for change in [c for c in changes if c.gain < 0][:most]]
    left_out = visits.total - len(visits.scores)
    read = f"{len(visits.scores)} of {visits.total} steps were read for this section." if left_out else ""
    strip = heat_strip(visits.scores, title="Scores of the completions of each step", standalone=False)
    return Markup(strip), read, gains, losses, len(changes)


def _changed(folder: Path, change: Change) -> _ShownPrompt:
    """A prompt with the first of its completions at its first and its last visit."""
    visits = [completions_of(folder, step=step, uid=change.uid) for step in (change.first, change.last)]
    answers = [_answer(rows[0], f"step {rows[0]['step']}, the first of {len(rows)}") for rows in visits if rows]
    shown = next((rows[0] for rows in visits if rows), {"prompt": "(cannot be read)"})
    facts = (
        ("mean score", f"{number(change.before)} → {number(change.after)}"),
        ("steps", f"{change.first} → {change.last}"), ("visits", str(change.times)),
    )  # fmt: skip
    return _ShownPrompt(_prompt(shown), _expected(shown), tuple(answers), facts)


def _prompt(row: Mapping[str, Any]) -> str:
    return shorten(row["prompt"] or "")


def _expected(row: Mapping[str, Any]) -> str:
    columns = row.get("columns") or ""
    return "" if columns in ("", "{}") else shorten(columns, 300)


def _given(row: Mapping[str, Any], given: str) -> _ShownCompletion:
    """An answer from the data."""
    facts = (("step", str(row["step"])), ("tokens", str(len(row["token_ids"] or ()))))
    return _ShownCompletion(name_of_given(given, row["sample"]), shorten(row["completion"] or ""), facts)


def _answer(row: Mapping[str, Any], when: str) -> _ShownCompletion:
    facts = [("score", number(row["score"]))]
    facts += [(name, number(value)) for name, value in row["parts"].items() if len(row["parts"]) > 1]
    if row["status"] != "scored":
        facts.append(("status", row["status"]))
    if row["extracted"] is not None:
        facts.append(("read as", shorten(row["extracted"], 80)))
    turns = row.get("turns") or ()
    facts.append(("tokens", str(sum(turn["sampled"] for turn in turns) if turns else len(row["token_ids"] or ()))))
    if row["finish_reason"] != "stop":
        facts.append(("ended by", row["finish_reason"]))
    if row.get("ending") not in ("", "done", None):
        facts.append(("episode ended by", row["ending"]))
    return _ShownCompletion(when, shorten(row["completion"] or ""), tuple(facts), conversation(row))
