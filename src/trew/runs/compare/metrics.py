"""The number that stands for a run in a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ...errors import ConfigError, DataError, nearest
from ...utils.metric_rows import is_evaluation
from ..report.read import points
from .members import Member

ACCEPTS = "final, last:K, area, reach:ACCURACY (as reach:0.8), or COLUMN:K of metrics.jsonl (as reward:10)"


class Metric(Protocol):
    """A number for each run."""

    @property
    def title(self) -> str: ...

    @property
    def better(self) -> Literal["higher", "lower"]: ...

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1, so that differences are points of accuracy."""
        ...

    def scores(self, members: Sequence[Member]) -> list[float]:
        """One number for each run. Raises DataError, which names the runs, if there is none."""
        ...

    def notes(self, members: Sequence[Member]) -> list[str]: ...


def _after_start(member: Member) -> list[float]:
    """The accuracies after step 0. A run that ended before its first evaluation is counted with that of the start."""
    found = [accuracy for step, accuracy in member.evals if step]
    return found or ([] if member.finished else [member.evals[-1][1]])


@dataclass(frozen=True, slots=True)
class LastEvaluations:
    """The mean accuracy of the last ``count`` evaluations after step 0."""

    count: int
    better: Literal["higher", "lower"] = "higher"
    is_share: bool = True

    @property
    def title(self) -> str:
        return "held-out accuracy " + ("at the end" if self.count == 1 else f"over the last {self.count} evaluations")

    def scores(self, members: Sequence[Member]) -> list[float]:
        trained = [_after_start(m) for m in members]
        few = [m.name for m, values in zip(members, trained, strict=True) if m.finished and len(values) < self.count]
        if few:
            raise DataError(
                f"--metric: {few[0]} has fewer than {self.count} evaluations after step 0{_more(few)}; train with a "
                f"smaller eval.every{', or use final' if self.count > 1 else ''}"
            )
        return [float(np.mean(values[-self.count :])) for values in trained]

    def notes(self, members: Sequence[Member]) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class Area:
    """The mean height of the curve of held-out accuracy over steps (trapezoids)."""

    title: str = "held-out accuracy, mean over all steps (area under the curve)"
    better: Literal["higher", "lower"] = "higher"
    is_share: bool = True

    def scores(self, members: Sequence[Member]) -> list[float]:
        steps = _same_evaluations(members, "area")
        # By the trapezoids' area over the steps, so that it is an accuracy again.
        return [float(np.trapezoid([a for _, a in m.evals], steps)) / (steps[-1] - steps[0]) for m in members]

    def notes(self, members: Sequence[Member]) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class Reach:
    """How many completions a run had sampled at the first evaluation with at least ``accuracy``.

    Runs that never get there count as having reached it with the last completion that every run sampled: the restricted
    mean, with which a late success and a failure differ little.
    """

    accuracy: float
    better: Literal["higher", "lower"] = "lower"
    is_share: bool = False

    @property
    def title(self) -> str:
        return f"completions sampled until a held-out accuracy of {self.accuracy:g}"

    def scores(self, members: Sequence[Member]) -> list[float]:
        _same_evaluations(members, f"reach:{self.accuracy:g}")
        for m in members:
            _refuse_lost(m)
        # The same end for every run: one that was trained longer must not have more time to get there.
        end = min(m.completions for m in members)
        return [min(self._reached(m), float(end)) for m in members]

    def _reached(self, member: Member) -> float:
        step = next((step for step, accuracy in member.evals if accuracy >= self.accuracy), None)
        if step is None:
            return math.inf
        groups = sum(row.get("groups_sampled") or 0 for row in member.data.rows if row["step"] <= step)
        return float(groups) * float(member.settings.get("rollout.completions", 1))

    def notes(self, members: Sequence[Member]) -> list[str]:
        end = min(m.completions for m in members)
        late = [m.name for m in members if self._reached(m) > end]
        if not late:
            return []
        return [
            f"{len(late)} of {len(members)} runs did not reach {self.accuracy:g} within {end} completions and count as "
            f"{end}: {_some(late)}"
        ]


@dataclass(frozen=True, slots=True)
class Column:
    """The mean of a column of metrics.jsonl over the last ``count`` steps of a run, or evaluations where it is theirs.

    Steps may lack a value, as a KL without an update: the mean is then that of the others among the last ones, and a
    note says so. An evaluation that lacks one has judged nothing, and is refused as it is for every other metric.
    """

    name: str
    count: int
    better: Literal["higher", "lower"] = "higher"
    is_share: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}, {'mean ' * (self.count > 1)}of the {self._last}"

    @property
    def _last(self) -> str:
        return f"last {self.count} {self._unit}s" if self.count > 1 else f"last {self._unit}"

    @property
    def _unit(self) -> str:
        return "evaluation" if self.name.startswith("eval_") else "step"

    def scores(self, members: Sequence[Member]) -> list[float]:
        return [float(np.mean(self._values(m))) for m in members]

    def notes(self, members: Sequence[Member]) -> list[str]:
        found = [f"better means a higher {self.name} here; whether that is good is yours to judge"]
        counts = {m.name: len(self._values(m)) for m in members}
        if few := [f"{name} ({count} of {self.count})" for name, count in counts.items() if count < self.count]:
            found.append(
                f"{len(few)} of {len(members)} runs have no {self.name} in some of their {self._last}, and "
                f"count with the mean of the others: {_some(few)}"
            )
        return found

    def _values(self, member: Member) -> list[float]:
        """The values among the last steps or evaluations. Raises DataError where they give no mean."""
        rows = self._last_rows(member)
        values = {row["step"]: row[self.name] for row in rows if row.get(self.name) is not None}
        # Never an older value in place of a missing one: it would be that of other weights.
        lacking = [row["step"] for row in rows if row["step"] not in values]
        if lacking and self._unit == "evaluation":
            raise DataError(
                f"--metric: {member.name} has no {self.name} in its evaluation after step {lacking[0]}, in which "
                "nothing was judged that it counts; repeat the run, or leave it out"
            )
        if not values:
            raise DataError(
                f"--metric: {member.name} has no {self.name} in its {self._last}, from step {lacking[0]} on; give a "
                "larger number, or leave the run out"
            )
        if wrong := [step for step, value in values.items() if not math.isfinite(value)]:
            raise DataError(
                f"--metric: {member.name} has a value of {self.name} that is not finite in step {wrong[0]}; give a "
                "smaller number, or leave the run out"
            )
        return list(values.values())

    def _last_rows(self, member: Member) -> list[Mapping[str, Any]]:
        """The rows of the last steps or evaluations. Raises DataError if they are fewer, or some are lost."""
        rows = sorted(member.data.rows, key=lambda row: row["step"])
        if not any(row.get(self.name) is not None for row in rows):
            raise DataError(
                f"--metric: {member.name} has no {self.name!r}{nearest(self.name, member.data.metric_names())} in "
                f"metrics.jsonl; accepts {ACCEPTS}"
            )
        if self._unit == "evaluation":
            # By step: a resumed run may have repeated an evaluation, and the later one counts.
            rows = list({row["step"]: row for row in rows if is_evaluation(row)}.values())
        else:
            rows = [row for row in rows if not is_evaluation(row)]
        if len(rows) < self.count:
            raise DataError(
                f"--metric: {member.name} has fewer than {self.count} {self._unit}s in metrics.jsonl; give a smaller "
                "number, or leave the run out"
            )
        last = rows[-self.count :]
        # Without the row of a step, an earlier one would be among the last ones.
        if self._unit == "step":
            _refuse_lost(member, since=last[0]["step"])
        return last


def parse_metric(text: str) -> Metric:
    """The metric that ``text`` names. Raises ConfigError for anything else.

    >>> parse_metric("last:3").title, parse_metric("reach:0.8").better
    ('held-out accuracy over the last 3 evaluations', 'lower')
    """
    if text == "final":
        return LastEvaluations(1)
    if text == "area":
        return Area()
    name, colon, number = text.rpartition(":")
    wrong = ConfigError(f"--metric: got {text!r}, accepts {ACCEPTS}")
    if not colon or not name:
        raise wrong
    if name == "reach":
        value = _number(number)
        if value is None or not 0 < value <= 1:
            raise wrong
        return Reach(value)
    # isdecimal alone accepts digits of other scripts; bounded before int(), which may get thousands of digits.
    if not number.isdecimal() or not number.isascii() or len(number) > 9 or not 1 <= int(number) < 10**8:
        raise wrong
    return LastEvaluations(int(number)) if name == "last" else Column(name, int(number))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _same_evaluations(members: Sequence[Member], metric: str) -> list[int]:
    """The steps at which every run was evaluated. Raises DataError if there are fewer than three, or they differ."""
    # As keys: runs with the same steps fall together, and one entry means that all agree.
    steps = {tuple(step for step, _ in m.evals): m.name for m in members}
    short = next((name for at, name in steps.items() if len(at) < 3), None)
    if short is not None:
        raise DataError(
            f"--metric {metric}: {short} has fewer than three evaluations; set eval.every when training, or use final"
        )
    if len(steps) > 1:
        one, other, *_ = steps.values()
        raise DataError(
            f"--metric {metric}: {one} and {other} were evaluated at different steps; train with the same steps and "
            "eval.every, or use final"
        )
    return list(next(iter(steps)))


def _refuse_lost(member: Member, since: int = 1) -> None:
    """Raises DataError if rows of a run's steps from ``since`` on are lost or there twice."""
    if lost := member.lost_rows(since):
        raise DataError(
            f"--metric: {member.name}: {lost}, which it counts; put a backup of the file there, leave the run out, or "
            "use final"
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _more(names: Sequence[str]) -> str:
    return f" (nor have {len(names) - 1} others)" if len(names) > 1 else ""


def values_by_step(member: Member, name: str) -> Mapping[int, Any]:
    """A column of a run's metrics by step, without values that are not finite."""
    steps, values = points(member.data.rows, name)
    return {step: value for step, value in zip(steps, values, strict=True) if value is not None}
