"""``PolicyProgram``: the training of a policy, with its evaluation, its checkpoints and its state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config import Config
from ..diagnostics.health import Facts, Health
from ..diagnostics.monitors import Monitors
from ..eval import EvalResult, evaluate
from ..learner import Learner
from ..learner.critic import Critic, without_critic
from ..models import loading
from ..models.lora import Adapters
from ..models.sharded import Rows
from ..rollout import Engine, RolloutSource
from ..rollout.generate import generate
from ..rollout.given import GivenRollouts
from ..rollout.replay import ReplayRollouts
from ..rollout.sync import SyncRollouts
from ..runs import Trackers
from ..types import Sampling
from ..weights import InPlace, WeightSync
from . import guards, policy_state
from .changes import settings
from .memory_record import MemoryRecord
from .planning import Plan
from .policy_state import PolicyState
from .program import Program, Snapshot, Stateful
from .remembered import Shapes

MODEL, ADAPTERS = "model.", "adapter_model."
"""Prefixes of trained tensors' names in a checkpoint; the prefix decides the file."""


@dataclass(kw_only=True)
class PolicyProgram(Program):
    """A plan with its model loaded, and all parts of the run that keep state, monitor or write."""

    plan: Plan
    model: Any
    engine: Engine
    policy: Learner
    rollouts: SyncRollouts | ReplayRollouts | GivenRollouts
    source: RolloutSource  # of the loop: the rollouts, also for other ranks
    monitors: Monitors
    health: Health
    trackers: Trackers
    memory: MemoryRecord
    adapters: Adapters | None = None
    critic: Critic | None = None
    weights: WeightSync = field(default_factory=InPlace)
    state: PolicyState = field(default_factory=PolicyState)
    player: Engine | None = None  # what generates rollouts, where that is more than the engine

    @property
    def config(self) -> Config:
        """The recipe."""
        return self.plan.config

    @property
    def remembers(self) -> Shapes:
        return policy_state.SHAPES

    @property
    def stateful(self) -> dict[str, Stateful]:
        return {
            "engine": self.engine,
            "rollouts": self.rollouts,
            "monitors": self.monitors,
            "rewards": self.plan.rewards,
            "health": self.health,
        }

    @property
    def keep(self) -> int:
        # A checkpoint from before the bad steps must survive them: the run that ends on them is resumed from there.
        return self.timetable.keep + self.state.bad_steps

    @property
    def best(self) -> int | None:
        return self.state.best_step if self.config.checkpoint.best else None

    def evaluate(self) -> dict[str, Any]:
        """Measures accuracy on the held-out prompts; logs a metrics row, writes the rollouts, updates the best step."""
        # An evaluation in which nothing was judged has no mean, and is never the best.
        state = self.state
        result = self.measure(f"evaluating after step {state.step}" if state.step else "evaluating before training")
        out = result.to_json()
        a = out["accuracy"]
        # Strictly better: of equal evaluations the earliest stays the best. Step 0 has no checkpoint.
        if state.step and a["mean"] is not None and (state.best_accuracy is None or a["mean"] > state.best_accuracy):
            state.best_step, state.best_accuracy = state.step, a["mean"]
        row = {"step": state.step, "eval_accuracy": a["mean"], "eval_low": a["low"], "eval_high": a["high"],
               "eval_n": out["n"]}  # fmt: skip
        for name, found in out.get("sets", {}).items():
            own = found["accuracy"]
            row |= {f"eval_accuracy/{name}": own["mean"], f"eval_low/{name}": own["low"],
                    f"eval_high/{name}": own["high"], f"eval_n/{name}": found["n"]}  # fmt: skip
        self.folder.write_eval(state.step, result.groups)  # before the row, as in TrainingRun.record
        self.folder.log(row)
        self.trackers.log(state.step, row)
        self.display.row(row)
        # Of its own completions: the next step would tell them as its own, and after the last one there is none.
        for text in (*self.plan.rewards.take_warnings(), *([result.omission] if result.omission else ())):
            self.display.warn(f"evaluation: {text}")
            self.folder.event(f"step {state.step}: evaluation: {text}")
        return out

    def measure(self, name: str) -> EvalResult:
        """Accuracy on the held-out prompts. An interrupt stops it at once: a resumed run repeats the evaluation."""
        plan, e, r = self.plan, self.config.eval, self.config.rollout
        # No top-p, top-k or min-p: evaluations sample the policy itself.
        how = Sampling(
            max_tokens=e.max_tokens or r.max_tokens, temperature=e.temperature, stop=r.stop, seed=self.config.seed
        )
        stoppable = self.interrupts.anywhere("during an evaluation; continue with --resume")
        bar = self.display.bar(name, len(plan.eval) * e.samples)
        with stoppable, guards.memory(self, lambda: "evaluating"), bar as shown:
            return evaluate(
                functools.partial(generate, self.player or self.engine), plan.eval, plan.rewards, samples=e.samples,
                sampling=how, correct=plan.correct, progress=shown.advance, sets=self.config.set_names,
            )  # fmt: skip

    def snapshot(self) -> Snapshot:
        tensors, counters = self.policy.state()
        if self.critic is not None:
            own, counted = self.critic.state()
            tensors, counters = tensors | own, counters | counted
        if self.adapters is None:
            return Snapshot(tensors, counters, functools.partial(loading.save_config, self.model))
        return Snapshot(for_files(tensors), counters, self.adapters.save_config)

    def load(self, tensors: Mapping[str, Tensor | Rows], counters: Mapping[str, Any]) -> None:
        load(self.policy, self.critic, tensors, counters)

    def restored(self) -> None:
        """Replays the rows so far through the health rules where what they read of the settings has changed: their
        stored state belongs to other windows and limits, and a report judges all rows by the settings of the end."""
        # The folder has the settings of before: they are written once the restore has succeeded.
        if Facts.of(settings(self.folder.folder) or {}) == self.health.facts:
            return
        fresh = Health(self.health.facts)
        for row in self.folder.rows():
            if row["step"] <= self.state.step:
                fresh.observe(row)
        self.health.load_state(fresh.state())


def load(
    policy: Learner, critic: Critic | None, tensors: Mapping[str, Tensor | Rows], counters: Mapping[str, Any]
) -> None:
    """Restores a checkpoint's tensors and counters. Raises CheckpointError where they belong to other models."""
    # The critic first: if it is refused, the policy is as it was.
    if critic is not None:
        critic.load_state(tensors, counters)
        tensors = without_critic(tensors)
    policy.load_state(from_files(tensors), counters)


def for_files(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters' tensors under the names of a checkpoint's files."""
    return {_for_peft(name): tensor for name, tensor in tensors.items()}


def from_files(tensors: Mapping[str, Tensor | Rows]) -> dict[str, Tensor | Rows]:
    """A checkpoint's tensors under the names of the model."""
    return {_from_peft(name): tensor for name, tensor in tensors.items()}


def _for_peft(name: str) -> str:
    """Translates ``model.x.lora_A.default.weight`` to peft's file format, prefixed with the file's name, so that peft
    can load a checkpoint's folder as it is."""
    if not name.startswith(MODEL):
        return name
    return f"{ADAPTERS}base_model.model.{name.removeprefix(MODEL).replace('.default.', '.')}"


def _from_peft(name: str) -> str:
    """
    >>> _from_peft(_for_peft("model.layers.0.q.lora_A.default.weight"))
    'model.layers.0.q.lora_A.default.weight'
    >>> _from_peft("optimizer.step.x")
    'optimizer.step.x'
    """
    if not name.startswith(ADAPTERS):
        return name
    inner, _, weight = name.removeprefix(f"{ADAPTERS}base_model.model.").rpartition(".")
    return f"{MODEL}{inner}.default.{weight}"
