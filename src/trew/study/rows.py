"""The figures of one run of a study, read from its folder: what is reported, and nothing else is kept of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..runs.report.read import RunData, load_run
from .design import Cell, Run
from .states import Place

LAST = 3
"""Evaluations at the end whose mean is the final accuracy: less noise than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. ``failed`` says why it counts as failed and is empty for others; a failed run keeps its figures, with
    its last evaluation for those that it did not reach."""

    task: str
    regime: str
    algorithm: str
    value: float | None  # of the tuned setting
    seed: int
    steps: tuple[int, ...]  # of the evaluations, from 0
    accuracy: tuple[float, ...]  # held out, at these steps
    completions: tuple[int, ...]  # sampled until then
    tokens: tuple[int, ...]
    optimizer_steps: int
    final: float
    area: float
    failed: str
    error: str
    entropy: tuple[float | None, float | None]  # of the first and the last step
    kl: float | None  # the largest of a step, to the policy that its ratio is measured against
    clipped: float | None  # means over steps
    truncated: float | None
    no_signal: float | None
    trew: str  # version
    seconds: float
    cpu_seconds: float
    load: float  # of the machine at the end
    arithmetic: str = ""  # whose kernels computed it, with how many threads; empty in files of earlier versions

    @property
    def run(self) -> Run:
        return Run(Cell(self.task, self.regime, self.algorithm), self.value, self.seed)

    @property
    def normalised(self) -> float:
        """(final - start) / (1 - start): tasks with other starts can be averaged."""
        start = self.accuracy[0]
        return (self.final - start) / (1 - start) if start < 1 else 0.0

    def within(self, completions: int) -> Row:
        """The run up to so many completions, with as many evaluations as it has had: between two of its own, figures
        are interpolated. The row itself if it sampled no more. What a run has one figure of, like its entropy at the
        end, and why it failed, stays that of the whole run."""
        if self.completions[-1] <= completions:
            return self
        at = [completions * step / self.steps[-1] for step in self.steps]
        accuracy = tuple(np.interp(at, self.completions, self.accuracy).tolist())
        tokens = tuple(round(count) for count in np.interp(at, self.completions, self.tokens).tolist())
        done = float(np.interp(completions, self.completions, self.steps)) / self.steps[-1]
        return dataclasses.replace(
            self, accuracy=accuracy, completions=tuple(map(round, at)), tokens=tokens, final=final_of(accuracy),
            area=area([*zip(self.steps, accuracy, strict=True)], end=self.steps[-1]),
            optimizer_steps=round(done * self.optimizer_steps),
        )  # fmt: skip

    def line(self) -> str:
        """The run in a few words."""
        told = f"{self.accuracy[0]:.2f} to {self.final:.2f}"
        return f"{told}, failed: {self.failed}" if self.failed else told

    def to_json(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_json(table: Mapping[str, Any]) -> Row:
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        return Row(**plain)


def read_row(run: Run, place: Place) -> Row:
    """The figures of a run that has ended. Raises DataError if its folder does not have them."""
    data, result = load_run(place.folder), place.read_result()
    evals = _evaluations(data)
    trained = [row for row in data.rows if "eval_accuracy" not in row]
    steps, accuracy = zip(*evals, strict=True)
    completions, tokens = zip(*(_sampled(data, trained, until=step) for step in steps), strict=True)
    error = str(result.get("failed", ""))
    final = final_of(accuracy)
    return Row(
        task=run.cell.task, regime=run.cell.regime, algorithm=run.cell.algorithm, value=run.value, seed=run.seed,
        steps=steps, accuracy=accuracy, completions=completions, tokens=tokens,
        optimizer_steps=int(_largest(trained, "policy_version") or 0), final=final,
        area=area(evals, end=int(data.config["steps"])), failed=_failed(accuracy, final, error), error=error,
        entropy=(_at(trained, "entropy", 0), _at(trained, "entropy", -1)), kl=_largest(trained, "kl_old"),
        clipped=_mean(trained, "clip_share"), truncated=_mean(trained, "truncated_share"),
        no_signal=_mean(trained, "zero_signal_share"), trew=str(data.summary.get("versions", {}).get("trew", "")),
        seconds=float(result.get("seconds", 0.0)), cpu_seconds=float(result.get("cpu_seconds", 0.0)),
        load=float(result.get("load", 0.0)), arithmetic=data.arithmetic,
    )  # fmt: skip


def _evaluations(data: RunData) -> list[tuple[int, float]]:
    """Step and accuracy of each evaluation. Raises DataError where the folder does not tell them all, or is of several
    settings."""
    measured = {row["step"]: row["eval_accuracy"] for row in data.rows if "eval_accuracy" in row}
    # Notes name lines that could not be read: figures without them would be wrong, and look right.
    if not measured or data.notes:
        raise DataError(f"{data.folder}: {'; '.join(data.notes) or 'has no evaluation'}; remove it, and it runs again")
    # Left out, an evaluation before or after it would stand for its weights.
    if unjudged := [step for step, accuracy in measured.items() if accuracy is None]:
        raise DataError(
            f"{data.folder}: nothing was judged in its evaluation after step {unjudged[0]}, so that its accuracy "
            "there is not known; see to its rewards (evals/ has the completions), and remove it, and it runs again"
        )
    # Of libraries, another version may round otherwise, and is still the same setting.
    if mixed := [change for change in data.changes if change.is_other_run]:
        raise DataError(f"{data.folder}: {mixed[0].told()} It is no run of one cell: remove it, and it runs again")
    return sorted(measured.items())


def final_of(accuracy: Sequence[float]) -> float:
    """The mean of the last evaluations, without the one before the first step, unless there is no other."""
    return float(np.mean(accuracy[1:][-LAST:] or accuracy))


def area(evals: Sequence[tuple[int, float]], *, end: int) -> float:
    """The mean height of the curve of accuracy over steps 0 to ``end``; one that stops before goes on at its height.

    >>> area([(0, 0.0), (2, 1.0)], end=4)
    0.75
    """
    steps, values = map(list, zip(*evals, strict=True))
    if steps[-1] < end:
        steps, values = [*steps, end], [*values, values[-1]]
    return float(np.trapezoid(values, steps)) / (steps[-1] - steps[0]) if steps[-1] > steps[0] else values[0]


def _failed(accuracy: Sequence[float], final: float, error: str) -> str:
    """Why a run counts as failed; empty if it does not."""
    if error:
        return "numbers not finite"
    if final < accuracy[0]:
        return "ended below its start"
    return "lost half of its best" if final < max(accuracy) / 2 else ""


def _sampled(data: RunData, trained: Sequence[Mapping[str, Any]], *, until: int) -> tuple[int, int]:
    """Completions and tokens that were sampled for training up to a step."""
    size = int(data.config["rollout"]["completions"])
    counts = [(size * (row.get("groups_sampled") or 0), row.get("completion_length") or 0)
              for row in trained if row["step"] <= until]  # fmt: skip
    return round(sum(count for count, _ in counts)), round(sum(count * length for count, length in counts))


def _known(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])]


def _at(rows: Sequence[Mapping[str, Any]], name: str, place: int) -> float | None:
    values = _known(rows, name)
    return values[place] if values else None


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _known(rows, name)
    return float(np.mean(values)) if values else None


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max(_known(rows, name), default=None)
