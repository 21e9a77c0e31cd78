"""Our side of step.py, a separate process: work_trew.py WORK MODEL OUT writes one JSON file.

Everything goes through the parts that ``trew train`` puts together: planning.plan, build, the engine's generate
and loop.update. Only rewards are given (by number, as on the other side), and what they cost is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trew.config import Config, apply_overrides, parse
from trew.rollout import StepRollouts
from trew.rollout.generate import generate
from trew.rollout.sync import sampling as sampling_of
from trew.runs import RunFolder, Trackers
from trew.training import loop, planning
from trew.training.attempt import Attempt
from trew.training.build import build
from trew.training.planning import Plan
from trew.training.policy_program import PolicyProgram
from trew.training.record import update_row
from trew.types import Group, Sampling, Score, ScoredGroup
from trew.utils.console import Silent
from trew.utils.signals import Interrupts
from work import Clock, Load, Watch, Work, end_ids, rewards, texts


def main() -> None:
    work, model, out = Work.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    if work.threads:
        torch.set_num_threads(work.threads)
    program = make(work, model)
    watch, clock = Watch(work.device), Clock(work.device)
    clock.wrap(program.engine, "submit", "generate")
    clock.wrap(program.engine, "poll", "generate")
    clock.wrap(program.policy, "logprobs", lambda *_, reference=False, **__: "ref" if reference else "old")
    clock.wrap(program.policy, "accumulate", "train")
    clock.wrap(program.policy, "apply", "train")
    steps, rollouts = [], []
    for number in range(1 + work.steps):
        start, load = clock.time(), Load()
        prompts = program.plan.train[number * work.prompts : (number + 1) * work.prompts]
        groups = generate(program.engine, prompts, n=work.group, sampling=sampling(work, program.config, number))
        row: dict[str, Any] = {}
        if work.train:
            row = learn(program, groups)
            assert not row["silent_share"], "a group without signal was skipped: not the same work"
        phases = clock.take() | {"total": clock.time() - start}
        told = {k: row.get(k) for k in ("loss", "grad_norm")} | {"foreign_cpu": load.foreign()}
        steps.append({"phases": phases, **counted(groups), **told})
        rollouts.append([[c.token_ids.tolist() for c in group.rollouts] for group in groups])
    out.write_text(json.dumps({"steps": steps, "rollouts": rollouts, **watch.result()}))


def config_of(work: Work, model: Path) -> Config:
    """A recipe of this work; what it does not name stays at its default."""
    rows = model / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts(work)))
    table: dict[str, Any] = {
        "model": str(model), "device": work.device, "threads": work.threads, "out": str(model / "run"),
        "data": {"task": "prompts", "train": str(rows), "eval": str(rows), "shuffle": False,
                 "max_prompt_tokens": work.prompt_tokens},
        "rewards": [{"name": "repetition", "args": {"ngram_size": 2, "max_penalty": -1.0}}],
        "rollout": {"prompts": work.prompts, "completions": work.group, "max_tokens": work.completion_tokens},
        "objective": {"preset": "grpo", "beta": work.beta, "std_eps": 1e-4},
        "learner": {"lr": 1e-6, "inner_updates": work.inner, "dtype": work.dtype},
        "eval": {"size": 1},
    }  # fmt: skip
    apply_overrides(table, work.overrides)
    return parse(table)


def built(plan: Plan) -> PolicyProgram:
    """The program of a plan, in an empty run folder."""
    folder = RunFolder.open(plan.config.out, overwrite=True)
    trackers = Trackers((), folder=folder.folder, config={}, warn=print)
    return build(plan, folder, trackers, Silent(), Interrupts(), contextlib.ExitStack())


def make(work: Work, model: Path) -> PolicyProgram:
    program = built(planning.plan(config_of(work, model)))
    # The engine ends a completion at the tokenizer's end token and at those of the model's generation configuration.
    program.plan.renderer.stop_ids = frozenset()
    program.model.generation_config.eos_token_id = end_ids(work) if work.ragged else None
    return program


def sampling(work: Work, config: Config, number: int) -> Sampling:
    how = sampling_of(config, number + 1, 0)
    return dataclasses.replace(how, temperature=0.0) if work.greedy else how


class Learning:
    """What :func:`trew.training.loop.update` reads of a TrainingRun."""

    def __init__(self, program: PolicyProgram) -> None:
        self.plan, self.config, self.objective = program.plan, program.config, program.plan.objective
        self.policy = program.policy

    critic = None

    def learning(self) -> None:
        """No progress bar, and no record of memory."""


def learn(program: PolicyProgram, groups: list[Group]) -> dict[str, Any]:
    """The update of a step on these groups, as the loop takes it; returns its figures."""
    kept = tuple(scored(groups))
    attempt = Attempt(1, program.policy.version, rollouts=StepRollouts(kept, kept))
    loop.update(Learning(program), attempt)  # type: ignore[arg-type]
    program.weights.publish(program.policy, program.engine)
    return update_row(attempt, program.policy.version)


def scored(groups: list[Group]) -> list[ScoredGroup]:
    return [
        ScoredGroup(group, tuple(Score(v, parts={"repetition": v}) for v in rewards(len(group.rollouts))))
        for group in groups
    ]


def counted(groups: list[Group]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(len(r.prompt_ids) for group in groups for r in group.rollouts),
        "completion_tokens": int(np.sum([len(c) for group in groups for c in group.rollouts])),
    }


if __name__ == "__main__":
    main()
