"""Assembles a run: the only module that knows which implementation is behind which protocol."""

from __future__ import annotations

import torch

from ..config import to_table
from ..diagnostics.health import Facts, Health
from ..diagnostics.monitors import Monitors
from ..learner import Learner
from ..rollout.sync import SyncRollouts
from ..rollout.torch_engine import TorchEngine
from ..runs import RunFolder, Trackers
from ..runs.writer import Writer
from ..utils.console import Display
from ..utils.signals import Interrupts
from . import backends, planning
from .planning import Plan
from .policy_program import PolicyProgram
from .program import Timetable


def build(plan: Plan, folder: RunFolder, trackers: Trackers, display: Display, interrupts: Interrupts) -> PolicyProgram:
    """Loads the model and assembles the training of a policy."""
    config = plan.config
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = backends.of(config, plan.device)
    if backend is not None:
        backend.start()
    model, adapters = planning.load(plan)
    # With adapters the reference is the model with them switched off: no second copy of the weights.
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
    # The writer saves the live tensors in the background, so an update must wait until it has read them.
    learner.before_update, learner.tell = writer.release, display.line
    program = PolicyProgram(
        plan=plan, model=model, engine=engine, policy=learner, rollouts=rollouts, adapters=adapters,
        monitors=Monitors(plan.rewards.rewards, shuffled=config.data.shuffle),
        health=Health(Facts.of(to_table(config))),
        timetable=Timetable(config.steps, config.eval.every, config.checkpoint.every, config.checkpoint.keep),
        fingerprint=plan.fingerprint, folder=folder, trackers=trackers, display=display, interrupts=interrupts,
        writer=writer,
    )  # fmt: skip
    rollouts.interruptible = lambda: interrupts.after_grace(program.saved())
    return program
