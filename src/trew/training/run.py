"""``TrainingRun``: what the loop calls, and everything around the algorithm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import NumericsError
from ..objective import TokenBatch
from ..rollout import StepRollouts
from ..runs import RunFolder, Trackers
from ..runs.report import write_report
from ..types import StepOutput
from . import evaluation, guards, watch
from .checkpoints import rollback_on_interrupt, save
from .frozen import Canary
from .parts import Parts
from .record import advantages_of, rollout_row, update_row
from .summary import export, summarize


@dataclass(slots=True)
class Attempt:
    """One try at a step. What it produced before an error stays, and is recorded with it."""

    step: int
    version: int  # of the policy before the first update
    start: float = field(default_factory=time.monotonic)
    rollouts: StepRollouts | None = None
    batch: TokenBatch | None = None
    canary: Canary | None = None
    updates: list[StepOutput] = field(default_factory=list)
    error: NumericsError | None = None
    told: str = ""  # what was said about the error


class TrainingRun:
    """A run that has its parts: ``config``, ``objective``, ``policy``, ``engine``, ``rollouts`` and ``weights``.

    The loop goes through ``steps``, makes an ``attempt`` at each, lets it be recorded, and calls ``finish``. Open it
    (``with run:``) around the loop: that shows the progress bar, and saves what a failed reward was about.
    """

    def __init__(self, parts: Parts, folder: RunFolder, trackers: Trackers) -> None:
        self.plan, self.config, self.objective = parts.plan, parts.config, parts.plan.objective
        self.policy, self.engine = parts.policy, parts.engine
        self.rollouts, self.weights = parts.rollouts, parts.weights
        self._parts, self._folder, self._trackers = parts, folder, trackers
        self._after: dict[str, Any] | None = None  # the last evaluation of this process
        self._open = contextlib.ExitStack()

    def __enter__(self) -> TrainingRun:
        parts = self._parts
        self._open.enter_context(watch.failures_saved(self._folder))
        bar = parts.display.bar("training", self.config.steps, done=parts.state.step)
        self._bar = self._open.enter_context(bar)
        parts.rollouts.note = self._bar.note
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def note(self, text: str) -> None:
        """Shows what the run is doing beside the progress bar."""
        self._bar.note(text)

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left. Between two steps the run evaluates, saves, and stops if asked to."""
        parts, state, interrupts = self._parts, self._parts.state, self._parts.interrupts
        while True:
            # Also right after a resume: the run may have stopped between a step and its evaluation.
            if evaluation.due(parts) and not (interrupts.asked and state.step < self.config.steps):
                self._after = evaluation.evaluate_weights(parts, self._folder, self._trackers)
            if state.step and (self._checkpoint_due() or interrupts.asked):
                save(parts, self._folder)
            if state.step == self.config.steps:
                parts.writer.finish()
                return
            if interrupts.asked:
                parts.writer.finish()  # before it is said that it was saved
            interrupts.stop_if_asked(parts.saved())
            yield state.step + 1

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[Attempt]:
        """A step is applied as a whole or not at all: what an interrupt ends has never begun; where something is not
        finite, the evidence is kept and the run goes on with the next step."""
        attempt = Attempt(step, self.policy.version)
        with rollback_on_interrupt(self._parts, self._folder):
            try:
                with guards.memory(self._parts, lambda: "learning" if attempt.rollouts else "generating"):
                    yield attempt
            except NumericsError as error:
                attempt.error = error
                attempt.told = guards.keep_evidence(self._parts, self._folder, attempt, error)

    def record(self, attempt: Attempt) -> None:
        """One row of metrics and one table of rollouts; warnings of rewards, monitors and health rules."""
        parts, state, step = self._parts, self._parts.state, attempt.step
        sampled = attempt.rollouts.sampled if attempt.rollouts else ()
        tokens = sum(len(rollout) for g in sampled for rollout in g.group.rollouts)
        seconds = time.monotonic() - attempt.start
        row = update_row(attempt, self.policy.version)
        state.step, state.tokens, state.seconds = step, state.tokens + tokens, state.seconds + seconds
        state.bad_steps = state.bad_steps + 1 if attempt.error else 0
        row |= watch.after_scoring(parts, self._folder, step, sampled)
        row |= {
            "step": step,
            **rollout_row(self.plan, sampled),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "bad_steps": state.bad_steps,
        }
        row["health"] = watch.after_step(parts, self._folder, row)
        self._folder.log(row)
        if sampled:
            self._folder.write_rollouts(step, sampled, advantages=advantages_of(attempt))
        self._trackers.log(step, row)
        parts.display.step(row)
        if attempt.error:
            guards.end_if_broken(parts, self._folder, attempt.error, attempt.told)
        every = self.config.track.samples_every
        if every and (step % every == 0 or step == 1):
            parts.display.samples(list(sampled[-1:]))
        self._bar.advance()

    def finish(self) -> dict[str, Any]:
        """Exports the model, writes summary and report, and returns the summary."""
        self._open.close()
        parts, folder = self._parts, self._folder
        after = self._after or parts.state.last_eval or {}
        export(parts, folder)
        summary = summarize(parts, after)
        folder.write_summary(summary)
        write_report([folder.folder], folder.folder / "report.html")
        parts.display.before_after(parts.state.before or {}, after)
        parts.display.warned([f"step {finding.step}: {finding.text}" for finding in parts.health.found])
        watch.at_end(folder, parts.display)
        return summary

    def _checkpoint_due(self) -> bool:
        config, step = self.config.checkpoint, self._parts.state.step
        best = config.best and step == self._parts.state.best_step
        return bool(config.every) and (best or step == self.config.steps or step % config.every == 0)
