"""The curves of a run as the page draws them: columns, evaluations, and marks on the axis of steps."""

from __future__ import annotations

import math
import re
from typing import Any

from ..diagnostics.health import finite
from ..runs.metric_help import GROUPS, help_of
from .curves import Curves
from .viewed import ViewedRun, whole

_EVENT = re.compile(r"(?P<when>\S+) (?:step (?P<step>\d{1,15}): )?(?P<text>.*)")
_RESUMED = re.compile(r"(dropped .*|continued )after step (-?\d{1,15})")
_MOST_EVENTS = 2000


def metrics(run: ViewedRun, *, since: int = -1, only: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Everything after step ``since``; of the columns ``only``, or all of them."""
    with run.lock:
        revision = run.revision  # of before the rows: what is added meanwhile is another revision
        curves = run.curves()
        order = _order(curves, since)
        names = [name for name in curves.columns if not only or name in only]
        return {
            "revision": revision,
            "read": curves.number,
            "problem": run.problem,
            "steps": [curves.steps[i] for i in order],
            "columns": {name: _numbers(curves.columns[name], order) for name in names},
            "evals": evaluations(curves),
            "eval_sets": {name: evaluations(curves, f"/{name}") for name in _sets(curves)},
            "losses": losses(curves),
            "eval_others": others(curves),
            "marks": marks(run, curves),
            "groups": groups(names),
            "help": {name: text for name in names if (text := help_of(name))},
        }


def _order(curves: Curves, since: int) -> list[int]:
    """The rows after ``since`` by step; the later one where a step has several."""
    steps = curves.steps
    last = {step: i for i, step in enumerate(steps) if step > since}
    return [last[step] for step in sorted(last)]


def _numbers(column: Any, order: list[int]) -> list[float | None]:
    return [value if math.isfinite(value := column[i]) else None for i in order]


def _sets(curves: Curves) -> list[str]:
    """The data sets whose held-out prompts were evaluated apart."""
    of = "eval_accuracy/"
    return sorted({key.removeprefix(of) for row in curves.evals.values() for key in row if key.startswith(of)})


def evaluations(curves: Curves, of: str = "") -> list[dict[str, Any]]:
    """The evaluations with their intervals, by step. ``of``: the end of the names of one data set's columns."""
    named = {"accuracy": "eval_accuracy", "low": "eval_low", "high": "eval_high", "n": "eval_n"}
    return [
        {"step": step, **{name: whole(finite(curves.evals[step].get(key + of))) for name, key in named.items()}}
        for step in sorted(curves.evals)
        if "eval_accuracy" in curves.evals[step]
    ]


def losses(curves: Curves) -> list[dict[str, Any]]:
    """The held-out losses of a training on demonstrations with their intervals, by step."""
    named = {"loss": "eval_loss", "low": "eval_loss_low", "high": "eval_loss_high", "n": "eval_n"}
    return [
        {"step": step, **{name: whole(finite(curves.evals[step].get(key))) for name, key in named.items()}}
        for step in sorted(curves.evals)
        if "eval_loss" in curves.evals[step] and "eval_accuracy" not in curves.evals[step]
    ]


_SHOWN = frozenset({"accuracy", "low", "high", "n", "loss", "loss_low", "loss_high"})


def others(curves: Curves) -> dict[str, list[dict[str, Any]]]:
    """What evaluations measured besides: of reward models AUC and loss, of demonstrations the perplexity, of pairs how
    many are in order. In the form of :func:`evaluations`, without intervals."""
    found: dict[str, list[dict[str, Any]]] = {}
    for step in sorted(curves.evals):
        row = curves.evals[step]
        # A loss beside an accuracy is none of :func:`losses`.
        known = _SHOWN - {"loss"} if "eval_accuracy" in row else _SHOWN
        for key, value in row.items():
            name = key.removeprefix("eval_")
            if name == key or name.partition("/")[0] in known or (number := finite(value)) is None:
                continue
            n = whole(finite(row.get("eval_n")))
            found.setdefault(name, []).append({"step": step, "accuracy": number, "low": None, "high": None, "n": n})
    return found


def marks(run: ViewedRun, curves: Curves) -> list[dict[str, Any]]:
    """What happened at a step besides learning: warnings, checkpoints, resumes, steps that were not applied."""
    found = [{"step": w.step, "kind": "warning", "text": w.text, "rule": w.rule} for w in curves.health.found]
    found += [
        {"step": at, "kind": "checkpoint", "text": f"checkpoint of step {at}"} for at in run.steps_of("checkpoints")
    ]
    found += [
        {"step": at, "kind": "bad_step", "text": f"step {at} had numbers that are not finite: bad_steps/{at:06d}.json"}
        for at in run.steps_of("bad_steps")
    ]
    # Warnings are in events.log as well: only one of the two is shown.
    told = {(w.step, w.text) for w in curves.health.found}
    found += [mark for mark in _events(run.text("events.log")) if (mark["step"], mark["text"]) not in told]
    return sorted(found, key=lambda mark: mark["step"])


def _events(text: str) -> list[dict[str, Any]]:
    """The lines of events.log that name a step, without those of steps that a resume took back; of the lines about one
    resume, the first."""
    found: list[dict[str, Any]] = []
    resumed: int | None = None
    for line in text.splitlines()[-_MOST_EVENTS:]:
        if (match := _EVENT.fullmatch(line)) is None:
            continue
        if match["step"]:
            # Another event ends the lines about one resume.
            resumed = None
            found.append({"step": int(match["step"]), "kind": "event", "text": match["text"]})
        elif again := _RESUMED.search(line):
            if int(again[2]) != resumed:
                resumed = int(again[2])
                found = _continued(found, resumed)
            # The last of the lines about one resume; runs of older versions have none.
            if again[1] == "continued ":
                resumed = None
    return found


def _continued(found: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The marks after a resume: what was said of later steps is of steps that are gone, and may never be again."""
    kept = [mark for mark in found if mark["kind"] == "resumed" or mark["step"] <= step]
    if step < 0:  # before the first checkpoint: it began again
        return kept
    return [*kept, {"step": step, "kind": "resumed", "text": f"continued after step {step}"}]


def groups(names: list[str]) -> list[dict[str, Any]]:
    """The curves in the order in which a reader wants them; those that no group names come last."""
    left, found = dict.fromkeys(names), []
    for title, wanted in GROUPS.items():
        members = [*dict.fromkeys(name for pattern in wanted for name in left if re.fullmatch(pattern, name))]
        if members:
            found.append({"title": title, "columns": members})
        # Taken away, so that a later group with a wider pattern does not show them again.
        for name in members:
            left.pop(name, None)
    return [*found, {"title": "Other", "columns": list(left)}] if left else found
