"""What both sides of learning.py share: the run that is asked for, its clock, and the file that a side writes.

Imported in the peer's environment too, which has trew's source on its path, for the rewards and the evaluation alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trew.cli import demo
from trew.config import Config
from trew.training import planning
from work import Load

RECIPE = Path(demo.__file__).with_name(demo.RECIPES["arithmetic"])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A run of one side: the recipe of ``trew demo`` with this many rollouts, and what they are learned from."""

    seed: int
    steps: int
    prompts: int
    completions: int
    minibatch_prompts: int
    eval_every: int
    eval_size: int = 200
    threads: int = 1
    peer_rows: int = 0  # sequences in one of TRL's micro-batches; 0: those of an optimizer step
    overrides: tuple[str, ...] = ()  # of the recipe: key=value

    @property
    def updates(self) -> int:
        """Optimizer steps on the rollouts of one step."""
        return self.prompts // self.minibatch_prompts

    @property
    def update_rows(self) -> int:
        """Completions that one optimizer step learns from."""
        return self.minibatch_prompts * self.completions

    @property
    def rows(self) -> int:
        """Completions in one of TRL's micro-batches."""
        return self.peer_rows or self.update_rows

    def config(self, out: Path) -> Config:
        """The recipe, as both sides read it. ``std_eps`` is TRL's constant."""
        given = {
            "seed": self.seed, "steps": self.steps, "threads": self.threads, "out": out,
            "rollout.prompts": self.prompts, "rollout.completions": self.completions,
            "learner.minibatch_prompts": self.minibatch_prompts, "objective.std_eps": 1e-4,
            "eval.every": self.eval_every, "eval.size": self.eval_size, "checkpoint.every": 0,
            "track.samples_every": 0, "track.regrade_every": 0,
        }  # fmt: skip
        return planning.read(RECIPE, [*(f"{key}={value}" for key, value in given.items()), *self.overrides])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Budget:
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, table: dict[str, Any]) -> Budget:
        return cls(**{**table, "overrides": tuple(table.get("overrides", ()))})


class TrainingClock:
    """Seconds and processor seconds of this process since it started, without what was done inside :meth:`paused`."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        seconds, processor = (now - start for now, start in zip(self._now(), self.start, strict=True))
        return {"seconds": seconds, "processor_seconds": processor}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = self._now()
        try:
            yield
        finally:
            self.start = tuple(s + now - b for s, now, b in zip(self.start, self._now(), before, strict=True))  # type: ignore[assignment]


@dataclass
class Curve:
    """What a side writes. The clock starts when the evaluation before training has ended, with everything loaded."""

    budget: Budget
    clock: TrainingClock = field(default_factory=TrainingClock)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    load_before: Sequence[float] = field(default_factory=os.getloadavg)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[dict[str, Any]]:
        """Leaves an evaluation out of the clock; its result is to be put into the dictionary."""
        if not self.evaluations:
            self.clock, self.load = TrainingClock(), Load()
        row: dict[str, Any] = {"step": len(self.steps), **self.clock.read()}
        with self.clock.paused():
            yield row
            self.evaluations.append(row)
        if len(self.evaluations) == 1:
            self.clock, self.load, self.load_before = TrainingClock(), Load(), os.getloadavg()

    def step(self, *, scores: Sequence[float], lengths: Sequence[int], prompt_ids: Iterable[Sequence[int]]) -> None:
        """Closes a step: the scores and lengths of its rollouts, and what they were sampled from."""
        self.steps.append({
            **self.clock.read(), "accuracy": sum(score >= 1 for score in scores) / len(scores),
            "rollouts": len(scores), "completion_tokens": sum(lengths), "prompts": digest(prompt_ids),
        })  # fmt: skip

    def write(self, path: Path, **more: Any) -> None:
        load = {"foreign_cpu": self.load.foreign(), "before": self.load_before, "after": os.getloadavg()}
        budget = dataclasses.asdict(self.budget)
        found = {"budget": budget, "steps": self.steps, "evaluations": self.evaluations, "load": load, **more}
        path.write_text(json.dumps(found, indent=1) + "\n")


def digest(prompt_ids: Iterable[Sequence[int]]) -> str:
    """Tells prompts apart by their tokens and their order."""
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompt_ids]).encode()).hexdigest()[:16]
