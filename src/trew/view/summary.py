"""A run in figures: before and after, warnings, memory, and the processes that it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..diagnostics.health import ADVICE, HealthWarning, finite
from ..diagnostics.outcome import READ, outcome
from ..runs import changes
from .curves import Curves
from .memory import memory
from .metrics import evaluations, losses
from .viewed import ViewedRun, whole


def summary(run: ViewedRun) -> dict[str, Any]:
    """Everything that is known at the end, or so far."""
    with run.lock:
        curves, table = run.curves(), run.summary
        evals = evaluations(curves)
        lost = losses(curves)
        findings = outcome(_rows(curves), run.config) if table and run.kind == "policy" else []
        unit = "round" if run.kind == "rounds" else "step"
        changed = [change.told(unit) for change in changes.read(run.text(changes.FILE))]
        return {
            # The summary first; while a run trains, its first and latest evaluation.
            "before": _measured(table, "accuracy_before") or (evals[0] if evals else None),
            "after": _measured(table, "accuracy_after") or (evals[-1] if len(evals) > 1 else None),
            "loss_before": _measured(table, "loss_before") or (lost[0] if lost else None),
            "loss_after": _measured(table, "loss_after") or (lost[-1] if len(lost) > 1 else None),
            "summary": table,
            "health": [_warning(warning, curves) for warning in curves.health.found],
            "outcome": [*changed, *findings],
            "memory": memory(run),
            "cluster": _cluster(run, curves),
            "problems": run.problems,
        }


def _rows(curves: Curves) -> list[dict[str, Any]]:
    """What findings about a whole run are made of."""
    found = curves.rows((*READ, "bad_steps"))
    for row in found:
        # A norm that is not finite is missing in the columns, as that of a step without an update: it is another thing.
        if row.get("bad_steps"):
            row.setdefault("grad_norm", math.nan)
    return found


def _measured(table: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What the summary says under ``name``: an accuracy, or a loss of held-out demonstrations."""
    given = table.get(name)
    if not isinstance(given, Mapping) or finite(given.get("mean")) is None:
        return None
    # Of this evaluation: another one may have left out other prompts without a verdict.
    own = table.get(name.partition("_")[2])
    own = own if isinstance(own, Mapping) else {}
    n = whole(finite(own.get("n", table.get("n_eval"))))
    return {
        name.partition("_")[0]: finite(given["mean"]),
        "low": finite(given.get("low")),
        "high": finite(given.get("high")),
        "n": n,
    }


def _warning(warning: HealthWarning, curves: Curves) -> dict[str, Any]:
    """A warning, and the last step at which its rule still held; None if it holds now."""
    advice = ADVICE.get(warning.rule, "")
    # The page shows the advice apart. Compared without its first letter, which may be small in the text.
    text = (
        warning.text[: -len(advice)].rstrip(" .") if advice and warning.text[1:].endswith(advice[1:]) else warning.text
    )
    # The stretch in which the warning was given. Without one it is known of its own step only.
    until: int | None = warning.step
    for first, last in curves.held.get(warning.rule, ()):
        if first is not None and first <= warning.step and (last is None or warning.step <= last):
            until = last
    return {"rule": warning.rule, "step_from": warning.step, "step_to": until, "text": text, "advice": advice}


def _cluster(run: ViewedRun, curves: Curves) -> dict[str, Any] | None:
    """Ranks, servers and versions; None for a run of one process."""
    values = run.values
    ranks = whole(finite(values.get("cluster.learner"))) or 1
    if ranks == 1 and values.get("cluster.rollout", "embedded") == "embedded":
        return None
    latest = {name: value for name, column in curves.columns.items()
              if (value := _last(column)) is not None}  # fmt: skip
    ages = {name.removeprefix("age/"): value for name, value in latest.items() if name.startswith("age/")}
    endpoints = values.get("cluster.endpoints")
    servers = [str(one) for one in endpoints] if isinstance(endpoints, list) and endpoints else _logs(run)
    version = latest.get("policy_version")
    return {
        "ranks": ranks, "servers": servers, "versions": None if version is None else int(version), "ages": ages,
        "staleness": values.get("cluster.staleness"), "age_mean": latest.get("age_mean"),
        "age_max": latest.get("age_max"), "waited_s": latest.get("waited_s"), "idle_s": latest.get("idle_s"),
    }  # fmt: skip


def _logs(run: ViewedRun) -> list[str]:
    """The servers that a run started, by their logs."""
    return [name.removesuffix(".log") for name in run.names("servers") if name.endswith(".log")]


def _last(column: Any) -> float | None:
    value = column[-1] if len(column) else math.nan
    return value if math.isfinite(value) else None
