"""``TrainingRun``: the interface of the loop to its parts, and everything around the algorithm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import NumericsError
from ..rollout import StepRollouts
from ..runs.report import write_report
from ..types import ScoredGroup
from . import guards, watch
from .attempt import Attempt
from .batch import keep_schedule
from .memory_record import BETWEEN, EXPORTING, GENERATING, TRAINING
from .policy_program import PolicyProgram
from .record import advantages_of, correction_row, of_demonstrations, rollout_row, update_row
from .summary import export, show_result, summarize


class TrainingRun:
    """The interface of the loop: the parts of the algorithm (``config``, ``objective``, ``policy``, ``critic``,
    ``engine``, ``rollouts`` and ``weights``), and everything around it.

    The loop iterates over ``steps``, opens an ``attempt`` for each, passes it to ``record``, and calls ``finish``. It
    runs inside ``with run:``, which shows the progress bar and saves the evidence of a failed reward.
    """

    def __init__(self, program: PolicyProgram) -> None:
        self.plan, self.config, self.objective = program.plan, program.config, program.plan.objective
        self.policy, self.engine = program.policy, program.engine
        self.critic = program.critic
        self.rollouts, self.weights = program.source, program.weights
        self._program = program
        self._open = contextlib.ExitStack()

    def __enter__(self) -> TrainingRun:
        program = self._program
        program.memory.peaks.enter(BETWEEN)  # the first evaluation is no part of loading
        self._open.enter_context(watch.failures_saved(program.folder))
        bar = program.display.bar("training", self.config.steps, done=program.state.step)
        self._bar = self._open.enter_context(bar)
        program.rollouts.note = self._bar.note
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def learning(self) -> None:
        """Says that the rollouts of a step are there and the update begins."""
        self._attempt.learning = time.monotonic()
        self._bar.note("learning")
        self._program.memory.peaks.enter(TRAINING)

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps; evaluates, saves and stops in between (:meth:`.Program.steps`)."""
        return self._program.steps()

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[Attempt]:
        """Encloses one step. An interrupted step is rolled back; after a non-finite number, the evidence is saved and
        the run goes on with the next step."""
        self._attempt = attempt = Attempt(step, self.policy.version)
        keep_schedule(self.config, self.policy, self.critic, step)
        self._program.memory.peaks.enter(GENERATING)
        with self._program.rollback_on_interrupt():
            try:
                # "learning" begins once the rollouts exist: the lambda is called when memory runs out.
                with guards.memory(self._program, lambda: "learning" if attempt.rollouts else "generating"):
                    yield attempt
            except NumericsError as error:
                attempt.error = error
                attempt.message = guards.keep_evidence(self._program, attempt, error)
        attempt.end = time.monotonic()
        self._program.memory.peaks.enter(BETWEEN)
        self._program.team.stepped()

    def record(self, attempt: Attempt) -> None:
        """Writes a row of metrics and a table of rollouts; shows warnings of rewards, monitors and health rules."""
        program, state, folder, step = self._program, self._program.state, self._program.folder, attempt.step
        rollouts = attempt.rollouts or StepRollouts((), ())
        sampled = rollouts.sampled
        tokens = sum(len(rollout) for g in sampled for rollout in g.group.rollouts)
        now = time.monotonic()
        seconds = now - attempt.start
        row = update_row(attempt, self.policy.version) | correction_row(attempt, self.objective)
        row = of_demonstrations(row, prefers=self.config.prefers) if self.config.demonstrates else row
        # The step counts although it may not have been applied: its prompts are used up, and the schedule of
        # evaluations and checkpoints goes by steps.
        state.step, state.tokens, state.seconds = step, state.tokens + tokens, state.seconds + seconds
        # In a row: one good step forgets the bad ones before it.
        state.bad_steps = state.bad_steps + 1 if attempt.error else 0
        row |= watch.after_scoring(program, step, rollouts)
        row |= {
            "step": step,
            **rollout_row(self.plan, sampled),
            **({} if self.config.demonstrates else {"groups_trained": len(rollouts.trained_on)}),
            "seconds": seconds,
            **({} if self.config.demonstrates else attempt.seconds(now)),
            "tokens_per_second": tokens / seconds,
            "bad_steps": state.bad_steps,
        }
        row["health"] = watch.after_step(program, row)
        # The table first: whoever follows metrics.jsonl finds the completions of every row.
        if sampled:
            folder.write_rollouts(
                step, sampled, advantages=advantages_of(attempt), trained_on=rollouts.trained_on,
                effects=attempt.effects.columns() if attempt.effects else None, baselines=rollouts.baselines,
                sampler=self.plan.sampler,
            )  # fmt: skip
        folder.log(row)
        program.memory.update(program.team)
        program.trackers.log(step, row)
        program.display.row(row)
        # Last, so that the row and the rollouts of the step that ends the run are on disk.
        if attempt.error:
            guards.end_if_broken(program, attempt.error, attempt.message)
        self._show(step, sampled)
        self._bar.advance()

    def _show(self, step: int, sampled: Sequence[ScoredGroup]) -> None:
        """Shows some completions on screen every ``track.samples_every`` steps."""
        every = 0 if self.config.demonstrates else self.config.track.samples_every
        if every and (step % every == 0 or step == 1):
            self._program.display.samples(list(sampled[-1:]))

    def finish(self) -> dict[str, Any]:
        """Exports the model, writes summary and report, and returns the summary."""
        self._open.close()  # ends the progress bar before anything is printed
        program, folder = self._program, self._program.folder
        program.memory.peaks.enter(EXPORTING)
        # Before the summary, which marks a finished run: its final/ must be there (changes.complete).
        export(program)
        program.memory.peaks.enter(BETWEEN)
        program.memory.update(program.team, end=True)
        summary = summarize(program)
        folder.write_summary(summary)
        write_report([folder.folder])
        show_result(program)
        program.display.warned([f"step {finding.step}: {finding.text}" for finding in program.health.found])
        watch.at_end(folder, program.display)
        return summary
