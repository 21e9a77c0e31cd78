"""Evaluations of the current weights on the held-out prompts."""

from __future__ import annotations

import functools
from typing import Any

from ..eval import EvalResult, evaluate
from ..rollout.generate import generate
from ..runs import RunFolder, Trackers
from ..types import Sampling
from . import guards
from .checkpoints import rollback_on_interrupt
from .parts import Parts


def due(parts: Parts) -> bool:
    """Whether the current weights are to be evaluated and were not yet."""
    every, state = parts.config.eval.every, parts.state
    now = state.step in (0, parts.config.steps) or bool(every and state.step % every == 0)
    return now and state.evaluated != state.step


def evaluate_weights(parts: Parts, folder: RunFolder, trackers: Trackers) -> dict[str, Any]:
    """Evaluates the current weights; writes a row of its own and the rollouts."""
    state = parts.state
    with rollback_on_interrupt(parts, folder):  # the evaluation is made up for when the run is resumed
        result = measure(parts, f"evaluating after step {state.step}" if state.step else "evaluating before training")
    out = result.to_json()
    state.before = state.before or out
    state.last_eval, state.evaluated = out, state.step
    a = out["accuracy"]
    if state.step and a["mean"] is not None and (state.best_accuracy is None or a["mean"] > state.best_accuracy):
        state.best_step, state.best_accuracy = state.step, a["mean"]
    row = {"step": state.step, "eval_accuracy": a["mean"], "eval_low": a["low"], "eval_high": a["high"],
           "eval_n": out["n"]}  # fmt: skip
    folder.log(row)
    folder.write_eval(state.step, result.groups)
    trackers.log(state.step, row)
    return out


def measure(parts: Parts, name: str) -> EvalResult:
    """Accuracy on the held-out prompts; an interrupt leaves at once, since nothing is lost."""
    plan, e, r = parts.plan, parts.config.eval, parts.config.rollout
    how = Sampling(
        max_tokens=e.max_tokens or r.max_tokens, temperature=e.temperature, stop=r.stop, seed=parts.config.seed
    )
    stoppable = parts.interrupts.anywhere("during an evaluation; continue with --resume")
    bar = parts.display.bar(name, len(plan.eval) * e.samples)
    with stoppable, guards.memory(parts, lambda: "evaluating"), bar as shown:
        return evaluate(
            functools.partial(generate, parts.engine), plan.eval, plan.rewards, samples=e.samples, sampling=how,
            correct=plan.correct, progress=shown.advance,
        )  # fmt: skip
