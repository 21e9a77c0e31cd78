"""The algorithm: prompts -> rollouts -> scores -> advantages -> updates -> weights for the next rollouts.

:class:`.run.TrainingRun` does the rest: stopping and resuming, evaluations and checkpoints, steps whose numbers are not
finite, and everything that is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch import minibatches, to_batch
from .effects import TokenEffects
from .frozen import with_frozen_logprobs
from .guards import check_advantages, check_given

if TYPE_CHECKING:
    from .attempt import Attempt
    from .run import TrainingRun


def train(run: TrainingRun) -> dict[str, Any]:
    """Runs all remaining steps and returns the summary."""
    every = run.config.learner.reference_every
    for step in run.steps():  # evaluates and saves when due; ends early when asked to
        # After every k-th step, but in the next one: an evaluation in between measures by the reference that the step
        # was trained with, and not by one that is the policy itself. A resumed run finds the same place.
        moves = bool(every) and step > 1 and (step - 1) % every == 0
        with run.attempt(step) as attempt:  # non-finite numbers: not applied; an interrupt: rolled back
            attempt.rollouts = run.rollouts.next(step)
            if moves:  # only now: a step that is interrupted while it samples is done again, from here too
                run.policy.update_reference()
                moves = False
            if attempt.rollouts.trained_on:
                update(run, attempt)
        # Published before trained(), after which a source may sample the next rollouts with these weights.
        run.weights.publish(run.policy, run.engine)
        run.rollouts.trained(step, run.policy.version)
        if moves:  # where the sampler failed
            run.policy.update_reference()
        run.record(attempt)
    return run.finish()


def update(run: TrainingRun, attempt: Attempt) -> None:
    """Takes all optimizer steps on the rollouts of one step.

    An update with a non-finite number is not applied, nor are those after it; the updates before it stay.
    """
    policy, objective, rollouts = run.policy, run.objective, attempt.rollouts
    assert rollouts is not None
    run.learning()
    samples, attempt.batch = to_batch(run.plan, rollouts)
    check_given(attempt.batch)
    frozen = with_frozen_logprobs(run.plan, policy, rollouts.trained_on, samples, attempt.batch)
    attempt.canary, attempt.effects = frozen.canary, TokenEffects(samples, frozen.batch)
    batch = frozen.batch if run.critic is None else frozen.batch.replace(values=run.critic.values(samples))
    attempt.batch = objective.prepare(batch)  # advantages, denominators and weights of the whole step
    check_advantages(attempt.batch)
    if frozen.on_policy:
        # r is exactly 1: the objective takes the old log-probs from the update's own forward pass.
        attempt.batch = attempt.batch.replace(old_logprobs=None)
    for part in minibatches(samples, attempt.batch, objective, run.config.learner):
        with part.named():
            if run.critic is not None:
                attempt.critic_updates.append(run.critic.step(part.samples, part.batch))
            if attempt.step <= run.config.critic.warmup_steps:
                continue  # the critic learns alone
            gradient = policy.accumulate(part.samples, part.batch)
            attempt.updates.append(policy.apply(gradient))
        attempt.effects.add(gradient, part.positions)
