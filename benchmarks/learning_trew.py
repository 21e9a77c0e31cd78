"""trew's side of learning.py, a process of its own: learning_trew.py BUDGET OUT SCRATCH writes one JSON file.

It is ``trew train``, with a clock around its steps and its evaluations.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import trew
from learning_sides import Budget, Curve
from trew.training.attempt import Attempt
from trew.training.policy_program import PolicyProgram
from trew.training.run import TrainingRun
from trew.utils.console import Silent


def main() -> None:
    budget, out, scratch = Budget.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    curve = Curve(budget)
    watch(curve)
    trew.train(budget.config(scratch), display=Silent(), overwrite=True)
    curve.write(out, versions={"trew": trew.__version__, **libraries()})


def watch(curve: Curve) -> None:
    """Has every run of this process write its steps and evaluations into ``curve``."""
    evaluate, record = PolicyProgram.evaluate, TrainingRun.record

    def evaluated(program: PolicyProgram) -> dict[str, Any]:
        with curve.evaluating() as row:
            found = evaluate(program)
            row["accuracy"] = found["accuracy"]
        return found

    def recorded(run: TrainingRun, attempt: Attempt) -> None:
        record(run, attempt)
        assert attempt.rollouts is not None
        groups = attempt.rollouts.sampled
        rollouts = [rollout for scored in groups for rollout in scored.group.rollouts]
        curve.step(
            scores=[float(score.value or 0.0) for scored in groups for score in scored.scores],
            lengths=[len(rollout) for rollout in rollouts],
            prompt_ids=[scored.group.rollouts[0].prompt_ids.tolist() for scored in groups],
        )

    PolicyProgram.evaluate, TrainingRun.record = evaluated, recorded  # type: ignore[method-assign]


def libraries() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    main()
