"""What a run watches beside learning: rewards that fail, that are not the same twice, or that look hacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from .errors import RewardError
from .job import Job
from .track import Run
from .types import ScoredGroup

UNJUDGED_STEPS = 3
"""After so many steps in a row in which no completion had a value the run ends: it would go on for nothing."""


@contextlib.contextmanager
def failures_saved(run: Run) -> Iterator[None]:
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


def after_scoring(job: Job, run: Run, step: int, seen: Sequence[ScoredGroup]) -> dict[str, Any]:
    """What rewards and monitors have to say about a step's completions: warnings on screen and in events.log; returned
    are the monitors' figures. Raises RewardError when nothing could be judged for several steps."""
    rewards, every = job.plan.rewards, job.config.track.regrade_every
    warnings = []
    if every and (step == 1 or step % every == 0) and seen:
        warnings += rewards.judged_alike(seen[step // every % len(seen)], step=step)
    row, suspicions = job.monitors.observe(seen, step=step)
    for text in [*rewards.take_warnings(), *warnings, *suspicions]:
        job.display.warn(text)
        run.event(f"step {step}: {text}")
    scores = [score for group in seen for score in group.scores]
    job.unjudged = job.unjudged + 1 if scores and all(score.value is None for score in scores) else 0
    if job.unjudged >= UNJUDGED_STEPS:
        statuses = sorted({score.status for score in scores})
        raise RewardError(
            f"{job.unjudged} steps in a row in which no completion got a value ({', '.join(statuses)}): nothing can be "
            "learned. Look at the warnings above; try the reward by itself (trew rewards test), or raise its timeout_s"
        )
    return row
