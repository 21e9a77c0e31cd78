"""Watches a run's rewards and metrics: rewards that fail, change when judged again or look hacked; health rules."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config import Config, to_table
from ..diagnostics.outcome import RIGHT
from ..errors import RewardError
from ..rewards.combine import FAILED
from ..rollout.source import StepRollouts
from ..runs import RunFolder
from ..runs.report.read import load_run
from ..types import Rollout, Score, ScoredGroup
from ..utils.commands import trial
from ..utils.console import Display
from ..utils.signals import Interrupted
from .policy_program import PolicyProgram
from .record import is_without_signal

UNJUDGED_STEPS = 3
"""The run ends after this many consecutive steps in which no completion had a value, or rewards failed for more than
the share ``track.max_failed``: nothing would be learned."""

REMEDIES = {
    "timeout": "raise its timeout_s",
    "not_applicable": "see why it says None (does not apply): the columns that it reads, its conditions",
}
"""What to do about completions without a value, by their status."""


@contextlib.contextmanager
def failures_saved(run: RunFolder) -> Iterator[None]:
    """Saves the evidence of a RewardError in the run's folder, and adds the path to its message."""
    try:
        yield
    except RewardError as error:
        if not error.evidence:
            raise
        path = run.write_failure(error.evidence)
        skip = ', or set on_failure = "skip" for this reward to leave such completions without a value'
        raise RewardError(
            f"{error}; saved with its traceback in {path}. Repair the function" + (skip if error.skippable else "")
        ) from error


def after_scoring(program: PolicyProgram, step: int, rollouts: StepRollouts) -> dict[str, Any]:
    """Reports warnings of rewards and monitors about a step's completions, on screen and in events.log; returns the
    monitors' metrics. Raises RewardError if too little could be judged for several steps."""
    if program.config.demonstrates:
        return {}
    rewards, every, sampled = program.plan.rewards, program.config.track.regrade_every, rollouts.sampled
    warnings = []
    for group in sampled:
        for rollout in group.group.rollouts:
            if rollout.status == "failed":
                rewards.warn("environment", _failure(group.group.prompt.uid, rollout))
    if sampled and not rollouts.trained_on:
        rewards.warn("dynamic sampling", _dropped(program.config, sampled))
    # A replay has scores that were given elsewhere, and perhaps not all that the rewards read.
    if every and (step == 1 or step % every == 0) and sampled and program.plan.replay is None:
        # An interrupt only skips this check: the step itself is done and must be recorded.
        with contextlib.suppress(Interrupted), program.interrupts.after_grace("while judging again"):
            # Another group each time.
            warnings += rewards.judged_alike(sampled[step // every % len(sampled)], step=step)
    row, suspicions = program.monitors.observe(sampled, step=step)
    for text in [*rewards.take_warnings(), *warnings, *suspicions]:
        program.display.warn(text)
        program.folder.event(f"step {step}: {text}")
    _end_if_unjudged(program, [score for group in sampled for score in group.scores])
    return row


def _failure(uid: str, rollout: Rollout) -> str:
    """One line about an episode whose environment failed: how, and the last line of its traceback."""
    kind, last = rollout.failure
    return f"environment: the episode of prompt {uid!r} {kind} and is not judged: {last}"


def _dropped(config: Config, sampled: Sequence[ScoredGroup]) -> str:
    """What to say about a step whose groups dynamic sampling dropped all."""
    differ = sum(not is_without_signal(group) for group in sampled)
    graded = f"; rewards differ in {differ} of them, which does not count" if differ else ""
    return (
        f"dynamic sampling kept none of the {len(sampled)} groups, so this step changed no weight: it keeps those with "
        f"right and wrong completions{graded}. {RIGHT.format(config.eval.correct_at)}"
    )


def _end_if_unjudged(program: PolicyProgram, scores: Sequence[Score]) -> None:
    """Counts consecutive steps that could not be judged, and raises RewardError after ``UNJUDGED_STEPS``."""
    state, most = program.state, program.config.track.max_failed
    lacking = Counter(score.status for score in scores if score.value is None)
    failed = sum(lacking[status] for status in FAILED)
    # Objectives that need no verdicts go on without them.
    none = lacking.total() == len(scores) and program.plan.objective.advantage.judged
    state.unjudged = state.unjudged + 1 if scores and (none or failed > most * len(scores)) else 0
    if state.unjudged < UNJUDGED_STEPS:
        return
    what = "no completion" if none else f"only {len(scores) - lacking.total()} of {len(scores)} completions"
    raise RewardError(
        f"{state.unjudged} steps in a row in which {what} got a value ({', '.join(sorted(lacking))}): "
        + ("nothing can be learned. " if none else f"rewards failed for more than track.max_failed = {most:g}. ")
        + f"Look at the warnings above; {_advice(program.config)}"
        + "".join(f", or {REMEDIES[status]}" for status in sorted(lacking) if status in REMEDIES)
    )


def _advice(config: Config) -> str:
    return f"try the {'environment' if config.environment.name else 'reward'} by itself ({trial(to_table(config))})"


def after_step(program: PolicyProgram, row: Mapping[str, Any]) -> int:
    """Reports what the rules of :mod:`.health` find in the rows so far; returns the number of rules that hold now."""
    for finding in program.health.observe(row):
        program.display.warn(f"step {finding.step}: {finding.text}")
        program.folder.event(f"step {finding.step}: {finding.text}")
    return len(program.health.holding)


def at_end(run: RunFolder, display: Display) -> None:
    """Reports the outcome of a finished run: see :mod:`trew.diagnostics.outcome`."""
    for text in load_run(run.folder).outcome:
        display.warn(text)
