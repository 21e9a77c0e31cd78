"""What a run is made of, and where it is put together: the only place that knows which implementation stands behind
which protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..config import Config, to_table
from ..diagnostics.health import Facts, Health
from ..diagnostics.monitors import Monitors
from ..learner import Learner
from ..models.lora import Adapters
from ..rollout.sync import SyncRollouts
from ..rollout.torch_engine import TorchEngine
from ..runs.writer import Writer
from ..utils.console import Display
from ..utils.signals import Interrupts
from ..weights import InPlace, WeightSync
from . import backends, planning
from .planning import Plan


@dataclass
class State:
    """What a run must remember besides weights and optimizer: all of it is in every checkpoint."""

    step: int = 0
    tokens: int = 0  # completion tokens generated in training
    seconds: float = 0.0
    before: dict[str, Any] | None = None  # evaluation before training
    last_eval: dict[str, Any] | None = None
    evaluated: int = -1  # the last step whose weights were evaluated
    saved: int = -1  # the last step that has a checkpoint
    best_step: int = -1  # the step with the best evaluation after training began, the earliest of equals
    best_accuracy: float | None = None
    bad_steps: int = 0  # steps in a row that were not applied, for numbers that are not finite
    unjudged: int = 0  # steps in a row in which no completion had a value


class Stateful(Protocol):
    """Something that counts or warns over several steps: its state is in every checkpoint."""

    def state(self) -> dict[str, Any]:
        """As JSON can hold it, and not changed afterwards."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken."""
        ...


@dataclass
class Parts:
    """A plan with its model loaded, and everything that a run remembers, watches and writes with."""

    plan: Plan
    model: Any
    engine: TorchEngine
    policy: Learner
    rollouts: SyncRollouts
    display: Display
    interrupts: Interrupts
    adapters: Adapters | None = None
    state: State = field(default_factory=State)
    monitors: Monitors = field(default_factory=Monitors)
    health: Health = field(default_factory=lambda: Health(Facts()))
    writer: Writer = field(default_factory=Writer)
    weights: WeightSync = field(default_factory=InPlace)

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Whatever else must go on as if the run had never stopped, by its name in checkpoints."""
        return {
            "engine": self.engine,
            "rollouts": self.rollouts,
            "monitors": self.monitors,
            "rewards": self.plan.rewards,
            "health": self.health,
        }

    @property
    def config(self) -> Config:
        return self.plan.config

    def saved(self) -> str:
        """What an interrupted run says."""
        if not self.state.step:
            return "before the first step was done; start again with --resume"
        return f"saved step {self.state.step} of {self.config.steps}; continue with --resume"


def build(plan: Plan, display: Display, interrupts: Interrupts) -> Parts:
    """Loads the model and puts the parts together."""
    config = plan.config
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = backends.of(config, plan.device)
    if backend is not None:
        backend.start()
    model, adapters = planning.load(plan)
    reference = None
    if "ref_logprobs" in plan.objective.needs and adapters is None:
        reference = planning.load_reference(plan, backend)
    autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    engine = TorchEngine(model, plan.renderer, batch=config.rollout.batch, autocast=autocast, backend=backend)
    learner = Learner(
        model, config=config.learner, objective=plan.objective, optimizer_steps=config.optimizer_steps,
        temperature=config.rollout.temperature, reference=reference, adapters=adapters,
        fused=config.kernels == "auto", backend=backend,
    )  # fmt: skip
    plan.rewards.load(device=plan.device, decode=plan.renderer.decode)
    rollouts = SyncRollouts(
        engine, config=config, objective=plan.objective, prompts=plan.train, rewards=plan.rewards, correct=plan.correct
    )
    writer = Writer(display.line, background=config.checkpoint.background)
    learner.before_update, learner.tell = writer.release, display.line
    parts = Parts(
        plan, model, engine, learner, rollouts, display, interrupts, adapters=adapters, writer=writer,
        monitors=Monitors(plan.rewards.rewards, shuffled=config.data.shuffle),
        health=Health(Facts.of(to_table(config))),
    )  # fmt: skip
    rollouts.interruptible = lambda: interrupts.after_grace(parts.saved())
    return parts
