"""What a run watches beside learning: rewards that fail, that are not the same twice, or that look hacked."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import RewardError
from ..rewards.combine import FAILED
from ..runs import RunFolder
from ..runs.report.read import load_run
from ..types import Score, ScoredGroup
from ..utils.console import Display
from ..utils.signals import Interrupted
from .policy_program import PolicyProgram

UNJUDGED_STEPS = 3
"""After so many steps in a row in which no completion had a value, or rewards failed for more than the share
``track.max_failed``, the run ends: it would go on for nothing."""


@contextlib.contextmanager
def failures_saved(run: RunFolder) -> Iterator[None]:
    """A RewardError inside leaves what it was about in the run's folder, and says where."""
    try:
        yield
    except RewardError as error:
        if not error.evidence:
            raise
        path = run.write_failure(error.evidence)
        raise RewardError(
            f'{error}; saved with its traceback in {path}. Repair the function, or set on_failure = "skip" for this '
            "reward to leave such completions without a value"
        ) from error


def after_scoring(program: PolicyProgram, step: int, sampled: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Shows what rewards and monitors have to say about a step's completions, on screen and in events.log; returns the
    monitors' figures. Raises RewardError when nothing, or too little, could be judged for several steps."""
    rewards, every = program.plan.rewards, program.config.track.regrade_every
    warnings = []
    if every and (step == 1 or step % every == 0) and sampled:
        with contextlib.suppress(Interrupted), program.interrupts.after_grace("while judging again"):
            warnings += rewards.judged_alike(sampled[step // every % len(sampled)], step=step)
    row, suspicions = program.monitors.observe(sampled, step=step)
    for text in [*rewards.take_warnings(), *warnings, *suspicions]:
        program.display.warn(text)
        program.folder.event(f"step {step}: {text}")
    _end_if_unjudged(program, [score for group in sampled for score in group.scores])
    return row


def _end_if_unjudged(program: PolicyProgram, scores: Sequence[Score]) -> None:
    """Counts the steps in a row that could not be judged, and raises RewardError after ``UNJUDGED_STEPS``."""
    state, most = program.state, program.config.track.max_failed
    lacking = Counter(score.status for score in scores if score.value is None)
    failed = sum(lacking[status] for status in FAILED)
    none = lacking.total() == len(scores)
    state.unjudged = state.unjudged + 1 if scores and (none or failed > most * len(scores)) else 0
    if state.unjudged < UNJUDGED_STEPS:
        return
    what = "no completion" if none else f"only {len(scores) - lacking.total()} of {len(scores)} completions"
    raise RewardError(
        f"{state.unjudged} steps in a row in which {what} got a value ({', '.join(sorted(lacking))}): "
        + ("nothing can be learned. " if none else f"rewards failed for more than track.max_failed = {most:g}. ")
        + "Look at the warnings above; try the reward by itself (trew rewards test), or raise its timeout_s"
    )


def after_step(program: PolicyProgram, row: Mapping[str, Any]) -> int:
    """Tells what the rules of :mod:`.health` find in the rows so far; returns how many of them hold."""
    for finding in program.health.observe(row):
        program.display.warn(f"step {finding.step}: {finding.text}")
        program.folder.event(f"step {finding.step}: {finding.text}")
    return len(program.health.holding)


def at_end(run: RunFolder, display: Display) -> None:
    """Tells what a finished run's rows say of it as a whole: see :mod:`trew.diagnostics.outcome`."""
    for text in load_run(run.folder).outcome:
        display.warn(text)
